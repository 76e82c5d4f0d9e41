/* Runs functions that tvmbridge.export wrote: header only, C++17, Linux.
 *
 *   tvmbridge::Function function("model.tvmb", 2);          // two threads
 *   tvm::ffi::Tensor x = tvmbridge::empty({1, 14}, DLDataType{kDLInt, 64, 1});
 *   std::vector<tvm::ffi::Tensor> results = function({x});
 *
 * Link libtvm_runtime.so, libtvm_runtime_extra.so and libtvm_ffi.so of TVM's wheels.
 */
#ifndef TVMBRIDGE_RUNTIME_H_
#define TVMBRIDGE_RUNTIME_H_

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tvmbridge {

namespace ffi = tvm::ffi;

/* A file is damaged, this machine cannot run it, or an argument does not fit. */
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

constexpr size_t kHeader = 64, kAlignment = 64;
constexpr int kDeepest = 256;

/* The CRC-32 of zlib, eight bytes at a time. */
class Crc32 {
 public:
  Crc32() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      table_[0][i] = c;
    }
    for (int t = 1; t < 8; ++t)
      for (uint32_t i = 0; i < 256; ++i)
        table_[t][i] = (table_[t - 1][i] >> 8) ^ table_[0][table_[t - 1][i] & 255];
  }
  uint32_t operator()(const char* data, size_t size) const {
    const unsigned char* p = reinterpret_cast<const unsigned char*>(data);
    uint32_t crc = 0xFFFFFFFFu;
    for (; size >= 8; size -= 8, p += 8) {
      uint32_t low = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24);
      crc = table_[7][low & 255] ^ table_[6][low >> 8 & 255] ^ table_[5][low >> 16 & 255] ^
            table_[4][low >> 24] ^ table_[3][p[4]] ^ table_[2][p[5]] ^ table_[1][p[6]] ^
            table_[0][p[7]];
    }
    for (; size; --size, ++p) crc = crc >> 8 ^ table_[0][(crc ^ *p) & 255];
    return crc ^ 0xFFFFFFFFu;
  }

 private:
  std::array<std::array<uint32_t, 256>, 8> table_;
};

/* A file in memory. */
class Mapped {
 public:
  explicit Mapped(const std::string& path) : path(path) {
    struct stat status;
    /* Opening a FIFO waits for a writer. */
    if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
      throw Error(path + " is no regular file");
    int file = open(path.c_str(), O_RDONLY);
    if (file < 0 || fstat(file, &status) != 0) throw Error(path + " cannot be read");
    size = static_cast<size_t>(status.st_size);
    if (size > 0) {
      void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
      data = at == MAP_FAILED ? nullptr : static_cast<char*>(at);
    }
    close(file);
    if (data == nullptr) throw Error(path + " is empty or cannot be mapped into memory");
  }
  ~Mapped() { munmap(data, size); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  std::string path;
  char* data = nullptr;
  size_t size = 0;
};

inline uint64_t number(const char* at, int bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, static_cast<size_t>(bytes));
  return value;
}

inline ffi::json::Object object(const ffi::Any& value) { return value.cast<ffi::json::Object>(); }
inline ffi::Any at(const ffi::json::Object& from, const char* key) {
  return from.at(ffi::String(key));
}
inline std::string text(const ffi::json::Object& from, const char* key) {
  return at(from, key).cast<ffi::String>();
}
inline int64_t integer(const ffi::json::Object& from, const char* key) {
  return at(from, key).cast<int64_t>();
}
inline ffi::json::Array list(const ffi::json::Object& from, const char* key) {
  return at(from, key).cast<ffi::json::Array>();
}

/* Parse JSON; TVM's parser overflows the stack if brackets are nested thousands of times. */
inline ffi::json::Object parsed(const std::string& path, const char* data, size_t size) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < size && depth < kDeepest; ++i) {
    if (quoted && data[i] == '\\') ++i;
    else if (data[i] == '"') quoted = !quoted;
    else if (!quoted && (data[i] == '[' || data[i] == '{')) ++depth;
    else if (!quoted && (data[i] == ']' || data[i] == '}')) --depth;
  }
  if (depth >= kDeepest) throw Error(path + " has a table that is nested too deeply");
  return object(ffi::json::Parse(ffi::String(data, size)));
}

inline ffi::json::Object manifest_of(const Mapped& file, size_t* body) {
  static const Crc32 crc;
  const std::string& path = file.path;
  if (file.size < kHeader || std::memcmp(file.data, "TVMBRG\x01\n", 8) != 0)
    throw Error(path + " is no function that tvmbridge exported, or is damaged");
  const char* data = file.data;
  bool intact = crc(data, 20) == number(data + 20, 4);
  for (size_t i = 24; i < kHeader; ++i) intact = intact && data[i] == 0;
  size_t length = number(data + 8, 8);
  if (!intact) throw Error(path + " is damaged: its header fails its checksum");
  if (length > file.size - kHeader) throw Error(path + " is truncated");
  if (crc(data + kHeader, length) != number(data + 16, 4))
    throw Error(path + " is damaged: its manifest fails its checksum");
  *body = kHeader + length;
  ffi::json::Object manifest = parsed(path, data + kHeader, length);
  if (integer(manifest, "format") != 1) throw Error(path + " has another format than 1");
  return manifest;
}

using Checksum = std::function<uint32_t(const char*, size_t)>;

/* Some chunks of a file: all from `first` on, up to `last`. */
struct Chunks {
  size_t first = 0, last = SIZE_MAX;
};

/* Compare the checksums of chunks, on all processors. */
inline void check_chunks(const std::string& path, const char* data, size_t size,
                         const ffi::json::Object& described, const Checksum& crc,
                         const Chunks& chunks = {}) {
  if (size != static_cast<size_t>(integer(described, "size")))
    throw Error(path + " is truncated, or something was appended");
  size_t chunk = static_cast<size_t>(integer(described, "chunk"));
  if (chunk == 0) throw Error(path + " has chunks of no bytes");
  std::vector<uint32_t> expected;
  for (const ffi::Any& sum : list(described, "crc32"))
    expected.push_back(static_cast<uint32_t>(sum.cast<int64_t>()));
  std::atomic<size_t> next{chunks.first};
  std::atomic<bool> damaged{(size - 1) / chunk + 1 != expected.size()};
  size_t last = std::min(chunks.last, expected.size());
  auto work = [&] {
    for (size_t i = next++; i < last && !damaged; i = next++) {
      size_t first = i * chunk;
      if (crc(data + first, std::min(chunk, size - first)) != expected[i]) damaged = true;
    }
  };
  std::vector<std::thread> threads;
  size_t parts = last > chunks.first ? last - chunks.first : 0;
  size_t count = std::min<size_t>({std::thread::hardware_concurrency(), parts, 8});
  for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (damaged) throw Error(path + " is damaged: its content fails its checksum");
}

inline void check_processor(const ffi::json::Object& target) {
#if defined(__x86_64__)
  const std::string here = "x86_64";
#elif defined(__aarch64__)
  const std::string here = "aarch64";
#else
  const std::string here = "another";
#endif
  if (text(target, "kind") == "cuda")
    throw Error("the code is for GPUs, which tvmbridge_runtime runs in Python alone: export it for a CPU");
  std::string wanted = text(target, "architecture");
  if (wanted != here) throw Error("the code is for " + wanted + " processors, not " + here);
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> present;
  for (std::string line; present.empty() && std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) present.insert(word);
  }
  for (const ffi::Any& feature : list(target, "features")) {
    std::string name = feature.cast<ffi::String>();
    if (!present.empty() && present.count(name) == 0)
      throw Error("the code needs " + name + ", which this processor does not have");
  }
}

/* The version of TVM's wheel that the loaded runtime belongs to; empty if it has no wheel. */
inline std::string tvm_version() {
  std::string found;
  auto note = [](dl_phdr_info* info, size_t, void* result) {
    std::string name = info->dlpi_name;
    if (std::filesystem::path(name).filename() == "libtvm_runtime.so")
      *static_cast<std::string*>(result) = name;
    return 0;
  };
  dl_iterate_phdr(note, &found);
  const std::string begin = "apache_tvm-", end = ".dist-info";
  std::error_code ignored;
  std::filesystem::path site = std::filesystem::path(found).parent_path().parent_path().parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(site, ignored)) {
    std::string name = entry.path().filename();
    if (name.rfind(begin, 0) == 0 && name.size() > begin.size() + end.size())
      return name.substr(begin.size(), name.size() - begin.size() - end.size());
  }
  return "";
}

inline void check_version(const std::string& path, const ffi::json::Object& versions) {
  std::string wanted = text(versions, "tvm"), found = tvm_version();
  if (!found.empty() && found != wanted)
    throw Error(path + " was compiled by TVM " + wanted + ", and the runtime is of TVM " + found);
}

/* Check that all of a shared library is there; the system's loader crashes otherwise. The table of
   sections is the last part of a library that a linker writes. */
inline void check_library(const std::string& path, const char* code, size_t size) {
  bool whole = size >= 64 && std::memcmp(code, "\x7f" "ELF\x02", 5) == 0;
  if (whole) {
    uint64_t at = number(code + 40, 8), room = number(code + 58, 2) * number(code + 60, 2);
    whole = at <= size && room <= size - at;
  }
  if (!whole) throw Error(path + " has code that is no whole library; export the function again");
}

/* The path of a file beside another, or beside the file that this one links to. */
inline std::string beside_of(const std::string& path, const std::string& name) {
  std::filesystem::path here = std::filesystem::path(path).parent_path() / name;
  std::error_code ignored;
  if (std::filesystem::exists(here, ignored)) return here;
  std::filesystem::path real = std::filesystem::weakly_canonical(path, ignored).parent_path() / name;
  return std::filesystem::exists(real, ignored) ? real : here;
}

/* The dtype of a tensor, whose elements are whole bytes. */
inline DLDataType dtype_of(const ffi::json::Object& spec) {
  DLDataType dtype = ffi::StringToDLDataType(text(spec, "dtype"));
  if (dtype.lanes != 1 || dtype.bits == 0 || dtype.bits % 8 != 0)
    throw std::invalid_argument("a tensor has dtype " + text(spec, "dtype"));
  return dtype;
}

/* The bytes of a tensor; more than `room` if they are more, also if the number overflows. */
inline uint64_t bytes_of(const std::vector<int64_t>& shape, DLDataType dtype, uint64_t room) {
  uint64_t bytes = dtype.bits / 8u;
  for (int64_t extent : shape) {
    if (extent == 0) return 0;
    if (extent < 0 || bytes > room / static_cast<uint64_t>(extent)) return room + 1;
    bytes *= static_cast<uint64_t>(extent);
  }
  return bytes;
}

/* The value of a condition on sizes: a number, a symbol, or an operator's name and its operands. */
inline int64_t value_of(const ffi::Any& condition, const std::map<std::string, int64_t>& sizes) {
  if (std::optional<bool> truth = condition.try_cast<bool>(); condition.type_index() == kTVMFFIBool)
    return *truth;
  if (std::optional<int64_t> value = condition.as<int64_t>()) return *value;
  if (std::optional<ffi::String> name = condition.as<ffi::String>()) return sizes.at(*name);
  ffi::json::Array parts = condition.cast<ffi::json::Array>();
  std::string op = parts[0].cast<ffi::String>();
  std::vector<int64_t> v;
  for (size_t i = 1; i < parts.size(); ++i) v.push_back(value_of(parts[i], sizes));
  if (v.empty() || (v.size() == 1 && op != "not"))
    throw Error("a condition on sizes lacks operands: " + op);
  auto floored = [](int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); };
  auto fold = [&v](auto combine) { return std::accumulate(v.begin() + 1, v.end(), v[0], combine); };
  if (op == "eq") return v[0] == v[1];
  if (op == "ne") return v[0] != v[1];
  if (op == "lt") return v[0] < v[1];
  if (op == "le") return v[0] <= v[1];
  if (op == "gt") return v[0] > v[1];
  if (op == "ge") return v[0] >= v[1];
  if (op == "not") return v[0] == 0;
  if (op == "and") return fold([](int64_t a, int64_t b) { return int64_t(a && b); });
  if (op == "or") return fold([](int64_t a, int64_t b) { return int64_t(a || b); });
  if (op == "add") return fold(std::plus<int64_t>());
  if (op == "mul") return fold(std::multiplies<int64_t>());
  if (op == "max") return fold([](int64_t a, int64_t b) { return std::max(a, b); });
  if (op == "min") return fold([](int64_t a, int64_t b) { return std::min(a, b); });
  if ((op == "floordiv" || op == "mod") && v[1] != 0)
    return op == "mod" ? v[0] - floored(v[0], v[1]) * v[1] : floored(v[0], v[1]);
  throw Error("a condition on sizes cannot be evaluated: " + op);
}

struct Aligned {
  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

/* Memory of a file, which the tensor keeps mapped. */
struct Borrowed {
  std::shared_ptr<Mapped> file;
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

}  // namespace detail

/* A tensor on the CPU with any values, which code can read as it is. */
inline ffi::Tensor empty(const std::vector<int64_t>& shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(detail::Aligned(), ffi::ShapeView(shape.data(), shape.size()),
                                  dtype, DLDevice{kDLCPU, 0});
}

/* An exported function; any number of threads may call it, and calls take turns. */
class Function {
 public:
  struct Input {
    std::string name;
    std::vector<std::string> shape; /* numbers, and names of symbols */
    DLDataType dtype;
  };

  /* threads: how many each call may use; 0: as many as there are processors. */
  explicit Function(const std::string& path, int threads = 0)
      : file_(std::make_shared<detail::Mapped>(path)) {
    try {
      read(path, threads);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw Error(path + " has a manifest that does not describe its content (" + error.what() +
                  "); export the function again");
    }
  }

  const std::vector<Input>& inputs() const { return inputs_; }

  /* The tensors that forward returns, in order. */
  std::vector<ffi::Tensor> operator()(const std::vector<ffi::Tensor>& given) {
    std::lock_guard<std::mutex> lock(*mutex_);
    std::vector<ffi::Any> arguments;
    std::vector<ffi::Tensor> kept = checked(given);
    for (const ffi::Tensor& tensor : kept) arguments.emplace_back(tensor);
    for (const ffi::Tensor& tensor : weights_) arguments.emplace_back(tensor);
    if (!symbols_.empty()) {
      arguments.emplace_back(ffi::Shape(sizes_));
      release_others();
    }
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any results;
    forward_.CallPacked(views.data(), static_cast<int32_t>(views.size()), &results);
    std::vector<ffi::Tensor> found;
    for (const ffi::Any& result : results.cast<ffi::Array<ffi::Any>>())
      found.push_back(result.cast<ffi::Tensor>());
    return owned(found);
  }

 private:
  void read(const std::string& path, int threads) {
    using namespace detail;
    size_t body = 0;
    manifest_ = manifest_of(*file_, &body);
    static const Crc32 by_table;
    ffi::json::Object described = object(at(manifest_, "body"));
    const char* data = file_->data + body;
    Chunks code = chunks_of_code(body);
    check_chunks(path, data, file_->size - body, described, by_table, code);
    check_processor(object(at(manifest_, "target")));
    check_version(path, object(at(manifest_, "versions")));
    read_inputs();
    void* library = load_code(body);
    /* The code has a checksum that is several times as fast. */
    using Crc = uint32_t (*)(const void*, size_t);
    auto fast = reinterpret_cast<Crc>(dlsym(library, "tvmbridge_crc32"));
    Checksum checksum = by_table;
    if (fast != nullptr) checksum = fast;
    check_chunks(path, data, file_->size - body, described, checksum, Chunks{code.last, SIZE_MAX});
    read_weights(body, checksum);
    if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
    auto use = reinterpret_cast<int (*)(int)>(dlsym(library, "tvmbridge_use_threads"));
    if (use != nullptr) use(threads);
  }

  void read_inputs() {
    for (const ffi::Any& each : detail::list(manifest_, "inputs")) {
      ffi::json::Object spec = detail::object(each);
      Input input{detail::text(spec, "name"), {}, detail::dtype_of(spec)};
      for (const ffi::Any& extent : detail::list(spec, "shape")) {
        std::optional<int64_t> size = extent.as<int64_t>();
        input.shape.push_back(size ? std::to_string(*size)
                                   : std::string(extent.cast<ffi::String>()));
      }
      inputs_.push_back(input);
    }
    for (const ffi::Any& each : detail::list(manifest_, "symbols"))
      symbols_.push_back(detail::object(each));
    for (const ffi::Any& each : detail::list(manifest_, "relations")) relations_.push_back(each);
    /* Calls read these: an entry that is missing is an error here. */
    ffi::json::Array outputs = detail::list(manifest_, "outputs");
    for (const ffi::Any& each : outputs)
      detail::at(detail::object(each), "copied").cast<bool>();
    for (const ffi::Any& each : detail::list(manifest_, "checks")) {
      detail::text(detail::object(each), "message");
      int64_t output = detail::integer(detail::object(each), "output");
      if (output < 0 || output >= static_cast<int64_t>(outputs.size()))
        throw Error("a check reads a result that there is not");
    }
  }

  /* The chunks that the code is in. */
  detail::Chunks chunks_of_code(size_t body) const {
    using namespace detail;
    ffi::json::Object place = object(at(object(at(manifest_, "sections")), "code"));
    size_t size = 0, chunk = static_cast<size_t>(integer(object(at(manifest_, "body")), "chunk"));
    if (chunk == 0) throw Error(file_->path + " has chunks of no bytes");
    size_t first = static_cast<size_t>(section(body, place, &size) - file_->data) - body;
    return Chunks{first / chunk, size == 0 ? first / chunk : (first + size - 1) / chunk + 1};
  }

  void read_weights(size_t body, const detail::Checksum& checksum) {
    using namespace detail;
    ffi::json::Array parameters = list(manifest_, "parameters");
    if (parameters.empty()) return;
    std::shared_ptr<Mapped> from = file_;
    const char* blob = nullptr;
    size_t size = 0;
    if (manifest_.count(ffi::String("beside"))) {
      ffi::json::Object beside = object(at(manifest_, "beside"));
      from = std::make_shared<Mapped>(beside_of(file_->path, text(beside, "file")));
      check_chunks(from->path, from->data, from->size, beside, checksum);
      blob = from->data;
      size = from->size;
    } else {
      ffi::json::Object sections = object(at(manifest_, "sections"));
      blob = section(body, object(at(sections, "weights")), &size);
    }
    size_t length = size < 8 ? 0 : number(blob, 8);
    if (size < 8 || length > size - 8) throw Error(from->path + " has no table of weights");
    ffi::json::Object table = parsed(from->path, blob + 8, length);
    for (const ffi::Any& each : parameters) {
      ffi::json::Object parameter = object(each);
      ffi::json::Object entry = object(table.at(ffi::String(text(parameter, "name"))));
      std::vector<int64_t> shape;
      for (const ffi::Any& extent : list(entry, "shape")) shape.push_back(extent.cast<int64_t>());
      uint64_t first = static_cast<uint64_t>(list(entry, "data_offsets")[0].cast<int64_t>());
      DLDataType dtype = dtype_of(parameter);
      uint64_t room = size - 8 - length;
      if (first > room || bytes_of(shape, dtype, room) > room - first)
        throw Error(from->path + " has a weight that reaches beyond its end");
      char* data = const_cast<char*>(blob) + 8 + length + first;
      weights_.push_back(weight(from, data, shape, dtype));
    }
  }

  /* The bytes of a section of the file, and their number. */
  const char* section(size_t body, const ffi::json::Object& place, size_t* size) const {
    uint64_t first = static_cast<uint64_t>(detail::integer(place, "offset"));
    uint64_t room = file_->size - body;
    *size = static_cast<size_t>(detail::integer(place, "size"));
    if (first > room || *size > room - first)
      throw Error(file_->path + " has a section that reaches beyond its end");
    return file_->data + body + first;
  }

  static ffi::Tensor weight(const std::shared_ptr<detail::Mapped>& file, char* data,
                            const std::vector<int64_t>& shape, DLDataType dtype) {
    if (reinterpret_cast<uintptr_t>(data) % detail::kAlignment != 0) {
      ffi::Tensor copy = empty(shape, dtype);
      std::memcpy(copy.data_ptr(), data, ffi::GetDataSize(copy));
      return copy;
    }
    return ffi::Tensor::FromNDAlloc(detail::Borrowed{file, data},
                                    ffi::ShapeView(shape.data(), shape.size()), dtype,
                                    DLDevice{kDLCPU, 0});
  }

  /* Load the code; return the handle of its library. */
  void* load_code(size_t body) {
    using namespace detail;
    ffi::json::Object code = object(at(object(at(manifest_, "sections")), "code"));
    size_t left = 0;
    const char* data = section(body, code, &left);
    check_library(file_->path, data, left);
    char path[] = "/tmp/tvmbridge-XXXXXX.so";
    int file = mkstemps(path, 3);
    while (file >= 0 && left > 0) {
      ssize_t written = write(file, data, left);
      if (written <= 0) break;
      data += written;
      left -= static_cast<size_t>(written);
    }
    if (file < 0 || close(file) != 0 || left > 0) {
      if (file >= 0) unlink(path);
      throw Error("the code cannot be put into /tmp");
    }
    try {
      ffi::Module library = ffi::Module::LoadFromFile(path);
      ffi::Function load = library->GetFunction("vm_load_executable").value();
      machine_ = load().cast<ffi::Module>();
      machine_.value()->GetFunction("vm_initialization").value()(1, 0, 2);
      forward_ = machine_.value()->GetFunction("forward").value();
      void* handle = dlopen(path, RTLD_NOW);
      if (handle == nullptr) throw Error(dlerror());
      unlink(path);
      return handle;
    } catch (const std::exception& error) {
      unlink(path);
      throw Error(file_->path + " cannot be loaded: " + error.what());
    }
  }

  /* TVM keeps the buffers of each size for later calls. Those of a few sizes are kept; another
     size returns them to the system. */
  void release_others() {
    constexpr size_t kKeptSizes = 4;
    if (served_.count(sizes_)) return;
    if (served_.size() == kKeptSizes) {
      ffi::Function::GetGlobalRequired("vm.builtin.memory_manager.clear")();
      served_.clear();
    }
    served_.insert(sizes_);
  }

  /* The arguments as code may read them. */
  std::vector<ffi::Tensor> checked(const std::vector<ffi::Tensor>& given) {
    if (given.size() != inputs_.size())
      throw Error(std::to_string(given.size()) + " arguments were given, and the function takes " +
                  std::to_string(inputs_.size()));
    std::map<std::string, int64_t> known;
    std::vector<ffi::Tensor> kept;
    for (size_t i = 0; i < given.size(); ++i) {
      const Input& input = inputs_[i];
      DLDataType dtype = given[i].dtype();
      std::string what = "argument '" + input.name + "' ";
      if (dtype.code != input.dtype.code || dtype.bits != input.dtype.bits || dtype.lanes != 1)
        throw Error(what + "has another dtype than " + ffi::DLDataTypeToString(input.dtype));
      if (static_cast<size_t>(given[i].ndim()) != input.shape.size())
        throw Error(what + "must have " + std::to_string(input.shape.size()) + " dimensions");
      for (size_t d = 0; d < input.shape.size(); ++d)
        check_extent(what, d, given[i].shape()[d], input.shape[d], &known);
      kept.push_back(readable(given[i]));
    }
    sizes_.clear();
    for (const ffi::json::Object& symbol : symbols_) {
      auto [scale, offset] = form_of(symbol);
      sizes_.push_back((known.at(detail::text(symbol, "name")) - offset) / scale);
    }
    for (const ffi::Any& relation : relations_)
      if (detail::value_of(relation, known) == 0)
        throw Error("the sizes do not fulfil " + std::string(ffi::json::Stringify(relation)));
    return kept;
  }

  void check_extent(const std::string& what, size_t dimension, int64_t extent,
                    const std::string& wanted, std::map<std::string, int64_t>* known) const {
    std::string place = what + "dimension " + std::to_string(dimension) + " is " +
                        std::to_string(extent) + " and must be ";
    for (const ffi::json::Object& symbol : symbols_) {
      if (detail::text(symbol, "name") != wanted) continue;
      auto [found, is_new] = known->emplace(wanted, extent);
      if (!is_new && found->second != extent)
        throw Error(place + wanted + ", which is " + std::to_string(found->second));
      std::optional<int64_t> most = detail::at(symbol, "most").as<int64_t>();
      if (extent < detail::integer(symbol, "least") || (most && extent > *most))
        throw Error(place + "within the bounds of " + wanted);
      auto [scale, offset] = form_of(symbol);
      if ((extent - offset) % scale != 0)
        throw Error(place + "a multiple of " + std::to_string(scale) + " plus " +
                    std::to_string(offset));
      return;
    }
    if (wanted != std::to_string(extent)) throw Error(place + wanted);
  }

  /* The scale and the offset of sizes that grow in steps, such as the sides of halved images. */
  static std::pair<int64_t, int64_t> form_of(const ffi::json::Object& symbol) {
    if (symbol.count(ffi::String("scale")) == 0) return {1, 0};
    int64_t scale = detail::integer(symbol, "scale");
    if (scale < 1) throw Error("a symbol of the manifest has the scale " + std::to_string(scale));
    return {scale, detail::integer(symbol, "offset")};
  }

  static ffi::Tensor readable(const ffi::Tensor& tensor) {
    bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % detail::kAlignment == 0;
    if (!tensor.IsContiguous()) throw Error("arguments must be contiguous");
    return aligned ? tensor : copied(tensor);
  }

  static ffi::Tensor copied(const ffi::Tensor& tensor) {
    ffi::ShapeView shape = tensor.shape();
    ffi::Tensor copy = empty(std::vector<int64_t>(shape.begin(), shape.end()), tensor.dtype());
    std::memcpy(copy.data_ptr(), tensor.data_ptr(), ffi::GetDataSize(tensor));
    return copy;
  }

  /* Results that share memory are copied; those that only a check reads are looked at. */
  std::vector<ffi::Tensor> owned(std::vector<ffi::Tensor> results) {
    ffi::json::Array outputs = detail::list(manifest_, "outputs");
    if (results.size() != outputs.size())
      throw Error("the code returns " + std::to_string(results.size()) + " results, not " +
                  std::to_string(outputs.size()));
    for (size_t i = 0; i < results.size(); ++i)
      if (detail::at(detail::object(outputs[i]), "copied").cast<bool>())
        results[i] = copied(results[i]);
    for (const ffi::Any& each : detail::list(manifest_, "checks")) {
      ffi::json::Object check = detail::object(each);
      const ffi::Tensor& passed = results[static_cast<size_t>(detail::integer(check, "output"))];
      if (*static_cast<const char*>(passed.data_ptr()) == 0)
        throw Error(detail::text(check, "message"));
    }
    results.resize(results.size() - detail::list(manifest_, "checks").size());
    return results;
  }

  std::shared_ptr<detail::Mapped> file_;
  ffi::json::Object manifest_;
  std::vector<Input> inputs_;
  std::vector<ffi::json::Object> symbols_;
  std::vector<ffi::Any> relations_;
  std::vector<int64_t> sizes_;
  std::set<std::vector<int64_t>> served_;
  std::vector<ffi::Tensor> weights_;
  std::optional<ffi::Module> machine_;
  ffi::Function forward_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
};

}  // namespace tvmbridge

#endif  // TVMBRIDGE_RUNTIME_H_
