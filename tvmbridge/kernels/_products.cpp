// Matrix products, ATen calls (_aten_calls.h), and GPU memory, for compiled code without Python between:
// kernels/matmul.py, aten_call.py and allocation.py have the same in Python, for where this could not be built, and
// matmul.py says what the spec of a product means. After a product of milliseconds the interpreter has to be read from
// memory again, which takes a tenth of one.

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>
#include <tvm/ffi/c_api.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

struct View {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
};

struct Product {
    std::optional<View> left;
    std::optional<View> right;
    std::vector<int64_t> shape; // of the result: two dimensions or three
};

// Specs ------------------------------------------------------------------------------------------

// Python functions, held for as long as the process lives. One returns the views and the shape of a product's spec.
// The other returns the key of a spec in which numbers have replaced the symbols.
PyObject *describe_product = nullptr, *key_at = nullptr;

std::vector<int64_t> integers(PyObject *tuple) {
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
        found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    return found;
}

std::optional<View> view_of(PyObject *object) {
    if (object == Py_None)
        return std::nullopt;
    return View{integers(PyTuple_GET_ITEM(object, 0)), integers(PyTuple_GET_ITEM(object, 1))};
}

// The thread's exception is set, and stays so until tvm_ffi raises it.
struct PythonError {};

// What is multiplied or called: the key of its spec, and the tensors. Code for any size has the values of its
// symbols between them.
struct Given {
    std::string key;
    std::string sizes; // bytes of int64; empty in code for one size
    const TVMFFIAny *tensors;
    int32_t count;

    std::string whole() const { return key + sizes; }
};

// Needs the interpreter; null if an exception is set.
PyObject *told(PyObject *function, const Given &given) {
    if (given.sizes.empty())
        return PyObject_CallFunction(function, "s#", given.key.data(), (Py_ssize_t)given.key.size());
    PyObject *key = PyObject_CallFunction(key_at, "s#y#", given.key.data(), (Py_ssize_t)given.key.size(),
                                          given.sizes.data(), (Py_ssize_t)given.sizes.size());
    PyObject *found = key == nullptr ? nullptr : PyObject_CallOneArg(function, key);
    Py_XDECREF(key);
    return found;
}

std::shared_ptr<const Product> described_product(const Given &given) {
    PyGILState_STATE state = PyGILState_Ensure();
    auto product = std::make_shared<Product>();
    PyObject *found = told(describe_product, given);
    if (found != nullptr && PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3) {
        product->left = view_of(PyTuple_GET_ITEM(found, 0));
        product->right = view_of(PyTuple_GET_ITEM(found, 1));
        product->shape = integers(PyTuple_GET_ITEM(found, 2));
    }
    bool failed = PyErr_Occurred() != nullptr;
    Py_XDECREF(found);
    PyGILState_Release(state);
    if (failed)
        throw PythonError();
    return product;
}

// What is known of each spec that was called. Sizes come without end, so that all is forgotten at times.
template <typename Known> class Table {
  public:
    template <typename Find> std::shared_ptr<Known> get(const Given &given, Find find) {
        std::string whole = given.whole();
        {
            std::lock_guard<std::mutex> lock(mutex);
            auto place = known.find(whole);
            if (place != known.end())
                return place->second;
        }
        // Found without the lock: another thread may have the interpreter and wait for this one.
        std::shared_ptr<Known> found = find(given);
        std::lock_guard<std::mutex> lock(mutex);
        if (known.size() >= most)
            known.clear();
        return known.try_emplace(std::move(whole), std::move(found)).first->second;
    }

  private:
    static constexpr size_t most = 1 << 16;
    std::mutex mutex;
    std::unordered_map<std::string, std::shared_ptr<Known>> known;
};

Table<const Product> products;

// Tensors ----------------------------------------------------------------------------------------

std::string string_of(const TVMFFIAny &any) {
    if (any.type_index == kTVMFFIRawStr) // of a caller: Python, or a virtual machine that is watched
        return any.v_c_str;
    TVMFFIByteArray bytes;
    if (any.type_index == kTVMFFISmallStr) {
        bytes = TVMFFISmallBytesGetContentByteArray(&any);
    } else {
        TORCH_CHECK(any.type_index == kTVMFFIStr, "expected a string, got a value of type ", any.type_index);
        bytes = *TVMFFIBytesGetByteArrayPtr(any.v_obj);
    }
    return std::string(bytes.data, bytes.size);
}

// A tensor of compiled code as PyTorch has it, by a view or as it lies.
at::Tensor tensor_of(const TVMFFIAny &any, const std::optional<View> &view) {
    TORCH_CHECK(any.type_index == kTVMFFITensor, "expected the tensors of a product");
    TVMFFIObjectHandle object = any.v_obj;
    const DLTensor *tensor = TVMFFITensorGetDLTensorPtr(object);
    bool cuda = tensor->device.device_type == kDLCUDA || tensor->device.device_type == kDLROCM;
    at::Device device = cuda ? at::Device(at::kCUDA, tensor->device.device_id) : at::Device(at::kCPU);
    auto options = at::TensorOptions().dtype(at::toScalarType(tensor->dtype)).device(device);
    void *data = static_cast<char *>(tensor->data) + tensor->byte_offset;
    TVMFFIObjectIncRef(object);
    auto release = [object](void *) { TVMFFIObjectDecRef(object); };
    if (view)
        return at::from_blob(data, view->sizes, view->strides, release, options, device);
    at::IntArrayRef shape(tensor->shape, tensor->ndim);
    if (tensor->strides == nullptr)
        return at::from_blob(data, shape, release, options, device);
    at::IntArrayRef strides(tensor->strides, tensor->ndim);
    return at::from_blob(data, shape, strides, release, options, device);
}

void hand_over(const at::Tensor &tensor, TVMFFIAny *result) {
    TVMFFIObjectHandle handle = nullptr;
    DLManagedTensor *managed = at::toDLPack(tensor);
    if (TVMFFITensorFromDLPack(managed, 0, 0, &handle) != 0) {
        managed->deleter(managed);
        TORCH_CHECK(false, "a tensor of PyTorch cannot be handed over");
    }
    result->type_index = kTVMFFITensor;
    result->v_obj = static_cast<TVMFFIObject *>(handle);
}

// Kernels ----------------------------------------------------------------------------------------

Given given_in(const TVMFFIAny *args, int32_t count, bool sized) {
    TORCH_CHECK(count > sized, "a kernel without a spec");
    Given given{string_of(args[0]), "", args + 1, count - 1};
    if (sized) {
        TORCH_CHECK(args[1].type_index == kTVMFFIShape, "expected the sizes of a kernel");
        const TVMFFIShapeCell *sizes = TVMFFIShapeGetCellPtr(args[1].v_obj);
        given.sizes.assign(reinterpret_cast<const char *>(sizes->data), sizes->size * sizeof(int64_t));
        ++given.tensors, --given.count;
    }
    return given;
}

template <bool sized> void multiply(const TVMFFIAny *args, int32_t count, TVMFFIAny *) {
    Given given = given_in(args, count, sized);
    TORCH_CHECK(given.count >= 3, "a product of less than two tensors");
    std::shared_ptr<const Product> product = products.get(given, described_product);
    at::Tensor left = tensor_of(given.tensors[0], product->left), right = tensor_of(given.tensors[1], product->right);
    at::Tensor out = tensor_of(given.tensors[given.count - 1], std::nullopt).view(product->shape);
    if (product->shape.size() == 3)
        at::bmm_out(out, left, right);
    else if (given.count == 3)
        at::mm_out(out, left, right);
    else
        at::addmm_out(out, tensor_of(given.tensors[2], std::nullopt), left, right);
}

using Linear = at::Tensor(const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                          std::string_view, c10::List<std::optional<at::Scalar>>,
                          std::optional<std::string_view>);

const c10::TypedOperatorHandle<Linear> &linear() {
    static auto handle = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Linear>();
    return handle;
}

template <bool sized> void multiply_by_onednn(const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    Given given = given_in(args, count, sized);
    TORCH_CHECK(given.count >= 2, "a product of less than two tensors");
    std::shared_ptr<const Product> product = products.get(given, described_product);
    at::Tensor left = tensor_of(given.tensors[0], product->left), right = tensor_of(given.tensors[1], product->right);
    std::optional<at::Tensor> bias;
    if (given.count > 2)
        bias = tensor_of(given.tensors[2], std::nullopt);
    c10::List<std::optional<at::Scalar>> none;
    hand_over(linear().call(left, right.t(), bias, "none", none, ""), result);
}

// Owners -----------------------------------------------------------------------------------------

// The storages of tensors that were handed over, by address. PyTorch's allocator knows the storage that it has
// made, and no other on the same memory: record_stream, on which NCCL relies, ignores a tensor from DLPack.
std::mutex storages_mutex;
std::unordered_map<const void *, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
size_t most_storages = 4096;

void note_storage(const at::Tensor &tensor) {
    std::lock_guard<std::mutex> lock(storages_mutex);
    if (storages.size() >= most_storages) {
        for (auto place = storages.begin(); place != storages.end();)
            place = place->second.expired() ? storages.erase(place) : std::next(place);
        most_storages = std::max<size_t>(4096, 2 * storages.size());
    }
    storages.insert_or_assign(tensor.storage().data(), tensor.storage().getWeakStorageImpl());
}

// The tensor on the storage that PyTorch has made; undefined if that storage is not known.
at::Tensor on_own_storage(const at::Tensor &tensor) {
    c10::intrusive_ptr<c10::StorageImpl> found;
    {
        std::lock_guard<std::mutex> lock(storages_mutex);
        auto place = storages.find(tensor.storage().data());
        if (place != storages.end())
            found = place->second.lock();
    }
    if (!found || found->nbytes() < tensor.storage().nbytes())
        return at::Tensor();
    at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor empty = at::empty({0}, tensor.options());
    return empty.set_(c10::Storage(found), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

// An uninitialised tensor of a shape and a dtype, in the memory of the current GPU.
void allocate(const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    TORCH_CHECK(count == 2 && args[0].type_index == kTVMFFIShape, "expected a shape and a dtype");
    DLDataType dtype = args[1].v_dtype;
    if (args[1].type_index != kTVMFFIDataType) { // a name, if an instrument watches the calls
        std::string name = string_of(args[1]);
        TVMFFIByteArray bytes{name.data(), name.size()};
        TORCH_CHECK(TVMFFIDataTypeFromString(&bytes, &dtype) == 0, "expected a dtype");
    }
    const TVMFFIShapeCell *shape = TVMFFIShapeGetCellPtr(args[0].v_obj);
    auto options = at::TensorOptions().dtype(at::toScalarType(dtype)).device(at::kCUDA);
    at::Tensor made = at::empty(at::IntArrayRef(shape->data, shape->size), options);
    note_storage(made);
    hand_over(made, result);
}

// Residuals --------------------------------------------------------------------------------------

// Whether the next backward of this thread may empty the array of its residuals.
thread_local bool may_empty = false;

// Backward has read the array's tensors into its registers, which hold each of them until its last use.
void empty_residuals(const TVMFFIAny *args, int32_t count, TVMFFIAny *) {
    if (!std::exchange(may_empty, false))
        return;
    TORCH_CHECK(count == 1 && args[0].type_index == kTVMFFIArray, "expected the array of residuals");
    auto *cell = reinterpret_cast<TVMFFISeqCell *>(reinterpret_cast<char *>(args[0].v_obj) + sizeof(TVMFFIObject));
    auto *items = static_cast<TVMFFIAny *>(cell->data);
    for (int64_t size = std::exchange(cell->size, 0); size > 0; --size)
        if (items[size - 1].type_index >= kTVMFFIStaticObjectBegin)
            TVMFFIObjectDecRef(items[size - 1].v_obj);
}

template <void (*kernel)(const TVMFFIAny *, int32_t, TVMFFIAny *)>
int called(void *, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    try {
        // Nothing is to be recorded of what compiled code computes.
        at::AutoDispatchBelowADInplaceOrView guard;
        kernel(args, count, result);
        return 0;
    } catch (const PythonError &) {
        TVMFFIErrorSetRaisedFromCStr("EnvErrorAlreadySet", "");
    } catch (const c10::NotImplementedError &error) {
        TVMFFIErrorSetRaisedFromCStr("NotImplementedError", error.what_without_backtrace());
    } catch (const c10::OutOfMemoryError &error) {
        TVMFFIErrorSetRaisedFromCStr("OutOfMemoryError", error.what_without_backtrace());
    } catch (const c10::Error &error) {
        TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what_without_backtrace());
    } catch (const std::exception &error) {
        TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
    }
    return -1;
}

bool set_global(const std::string &name, TVMFFISafeCallType function) {
    TVMFFIObjectHandle handle = nullptr;
    if (TVMFFIFunctionCreate(nullptr, function, nullptr, &handle) != 0)
        return false;
    TVMFFIByteArray words{name.data(), name.size()};
    int code = TVMFFIFunctionSetGlobal(&words, handle, 1);
    TVMFFIObjectDecRef(handle);
    return code == 0;
}

} // namespace

#include "_aten_calls.h"

namespace {

void hold(PyObject **place, PyObject *object) {
    Py_INCREF(object);
    Py_XSETREF(*place, object);
}

PyObject *register_kernels(PyObject *, PyObject *args) {
    const char *usual, *onednn, *empty, *residuals, *aten, *sized;
    PyObject *of_product, *of_call, *at_sizes;
    if (!PyArg_ParseTuple(args, "sssssOOsO", &usual, &onednn, &aten, &empty, &residuals, &of_product, &of_call,
                          &sized, &at_sizes))
        return nullptr;
    hold(&describe_product, of_product), hold(&describe_call, of_call), hold(&key_at, at_sizes);
    try {
        linear();
    } catch (const c10::Error &error) {
        Py_RETURN_FALSE;
    }
    std::string suffix(sized);
    if (set_global(usual, called<multiply<false>>) && set_global(usual + suffix, called<multiply<true>>) &&
        set_global(onednn, called<multiply_by_onednn<false>>) &&
        set_global(onednn + suffix, called<multiply_by_onednn<true>>) &&
        replace_global<false>(aten) && replace_global<true>(aten + suffix) &&
        set_global(empty, called<allocate>) && set_global(residuals, called<empty_residuals>))
        Py_RETURN_TRUE;
    PyErr_SetString(PyExc_RuntimeError, "TVM does not take the compiled kernels");
    return nullptr;
}

PyObject *note(PyObject *, PyObject *tensor) {
    if (!THPVariable_Check(tensor))
        return PyErr_Format(PyExc_TypeError, "expected a tensor");
    note_storage(THPVariable_Unpack(tensor));
    Py_RETURN_NONE;
}

PyObject *take_back(PyObject *, PyObject *tensor) {
    if (!THPVariable_Check(tensor))
        return PyErr_Format(PyExc_TypeError, "expected a tensor");
    try {
        at::Tensor found = on_own_storage(THPVariable_Unpack(tensor));
        if (found.defined())
            return THPVariable_Wrap(found);
    } catch (const std::exception &error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
    Py_RETURN_NONE;
}

PyObject *let_empty(PyObject *, PyObject *may) {
    may_empty = PyObject_IsTrue(may) == 1;
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"let_empty", let_empty, METH_O,
     "let_empty(may)\n--\n\nSay whether the next backward of this thread may empty the array of its residuals."},
    {"note", note, METH_O,
     "note(tensor)\n--\n\nRemember the storage of a tensor that is handed over by DLPack."},
    {"take_back", take_back, METH_O,
     "take_back(tensor)\n--\n\n"
     "Return a tensor from DLPack on the storage that was noted for its memory; None: on no noted one."},
    {"register_kernels", register_kernels, METH_VARARGS,
     "register_kernels(usual, onednn, aten, empty, residuals, of_product, of_call, sized, at_sizes)\n--\n\n"
     "Make the kernels known to TVM by these names, and by those with the suffix sized for code of any size.\n\n"
     "The three functions describe a product, describe an ATen call, and return a key with sizes put in.\n"
     "False: this PyTorch has another oneDNN."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tvmbridge.kernels._products",
    "The compiled half of tvmbridge.kernels.matmul.", -1, functions,
};

} // namespace

PyMODINIT_FUNC PyInit__products(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == nullptr)
        return nullptr;
    if (PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
