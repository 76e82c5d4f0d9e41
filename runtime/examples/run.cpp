// Loads an exported function, gives it arguments of ones, and prints its results.
//
//   g++ -std=c++17 -O2 run.cpp -o run $(python -m tvmbridge_runtime --cxx)
//   ./run model.tvmb
#include <tvmbridge_runtime.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

// An argument of ones; symbolic sizes are 2.
static tvm::ffi::Tensor ones(const tvmbridge::Function::Input& input) {
  std::vector<int64_t> shape;
  int64_t count = 1;
  for (const std::string& extent : input.shape) {
    bool is_number = extent.find_first_not_of("0123456789") == std::string::npos;
    shape.push_back(is_number ? std::stoll(extent) : 2);
    count *= shape.back();
  }
  tvm::ffi::Tensor tensor = tvmbridge::empty(shape, input.dtype);
  bool is_float = input.dtype.code == kDLFloat && input.dtype.bits == 32;
  std::memset(tensor.data_ptr(), 0, tvm::ffi::GetDataSize(tensor));
  for (int64_t i = 0; i < count; ++i) {
    if (is_float) {
      static_cast<float*>(tensor.data_ptr())[i] = 1.0f;
    } else if (input.dtype.bits == 64) {
      static_cast<int64_t*>(tensor.data_ptr())[i] = 1;
    }
  }
  return tensor;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run FILE\n");
    return 2;
  }
  try {
    tvmbridge::Function function(argv[1], 2);
    std::vector<tvm::ffi::Tensor> arguments;
    for (const auto& input : function.inputs()) arguments.push_back(ones(input));
    std::vector<tvm::ffi::Tensor> results = function(arguments);
    for (size_t i = 0; i < results.size(); ++i) {
      std::printf("result %zu:", i);
      for (int64_t extent : results[i].shape()) std::printf(" %lld", static_cast<long long>(extent));
      DLDataType dtype = results[i].dtype();
      if (dtype.code == kDLFloat && dtype.bits == 32 && results[i].numel() > 0)
        std::printf(", first %.9g", static_cast<const float*>(results[i].data_ptr())[0]);
      std::printf("\n");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
