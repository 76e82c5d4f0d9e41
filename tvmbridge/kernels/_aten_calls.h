// ATen calls without Python between, a part of _products.cpp: kernels/aten_call.py says what a spec means, and does
// the same in Python where this could not be built, and for the operators that it does not describe to us.

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace {

enum class Form { constant, tensor, complex, channels_last, view, list };

// One argument of an operator.
struct Argument {
    Form form = Form::constant;
    c10::IValue constant;
    int64_t number = 0; // of the call's tensor
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    c10::TypePtr element;        // of a list of tensors
    std::vector<Argument> items; // None is a constant
};

// One result that the graph uses.
struct Wanted {
    size_t position; // among the operator's results
    bool channels_last;
    std::vector<int64_t> shape;
    at::ScalarType dtype;
};

struct AtenCall {
    c10::OperatorHandle operation;
    std::vector<Argument> arguments;
    bool several; // the graph has a tuple
    std::vector<Wanted> results;
};

// Tells the operator of a spec, its arguments and results; held for as long as the process lives.
PyObject *describe_call = nullptr;
// Null: Python runs this call.
Table<const AtenCall> calls;
// The functions that run calls in Python: in code for one size, and for any.
TVMFFIObjectHandle in_python[2] = {nullptr, nullptr};

// Descriptions -----------------------------------------------------------------------------------

Argument argument_of(py::handle object, const c10::TypePtr &type) {
    Argument found;
    auto fields = py::cast<py::tuple>(object);
    auto form = py::cast<std::string>(fields[0]);
    if (form == "constant") {
        found.constant = torch::jit::toIValue(fields[1], type);
    } else if (form == "list") {
        auto list = type->castRaw<c10::OptionalType>() ? type->castRaw<c10::OptionalType>()->getElementType() : type;
        found.form = Form::list;
        found.element = list->expectRef<c10::ListType>().getElementType();
        for (auto item : py::cast<py::tuple>(fields[1]))
            found.items.push_back(argument_of(item, found.element));
    } else {
        found.number = py::cast<int64_t>(fields[1]);
        found.form = form == "complex" ? Form::complex : form == "channels_last" ? Form::channels_last : Form::tensor;
        if (form == "view") {
            found.form = Form::view;
            found.sizes = py::cast<std::vector<int64_t>>(fields[2]);
            found.strides = py::cast<std::vector<int64_t>>(fields[3]);
            found.offset = py::cast<int64_t>(fields[4]);
        }
    }
    return found;
}

std::shared_ptr<const AtenCall> call_from(py::handle description) {
    if (description.is_none())
        return nullptr;
    auto fields = py::cast<py::tuple>(description);
    auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(
        py::cast<std::string>(fields[0]).c_str(), py::cast<std::string>(fields[1]).c_str());
    auto call = std::make_shared<AtenCall>(AtenCall{operation, {}, py::cast<bool>(fields[3]), {}});
    const auto &schema = operation.schema().arguments();
    auto arguments = py::cast<py::tuple>(fields[2]);
    TORCH_CHECK(arguments.size() == schema.size(), "expected all arguments of ", operation.schema().name());
    for (size_t i = 0; i < schema.size(); ++i)
        call->arguments.push_back(argument_of(arguments[i], schema[i].type()));
    for (auto each : py::cast<py::tuple>(fields[4])) {
        auto result = py::cast<py::tuple>(each);
        call->results.push_back({py::cast<size_t>(result[0]), py::cast<bool>(result[1]),
                                 py::cast<std::vector<int64_t>>(result[2]), py::cast<at::ScalarType>(result[3])});
    }
    return call;
}

std::shared_ptr<const AtenCall> described_call(const Given &given) {
    py::gil_scoped_acquire interpreter;
    auto description = py::reinterpret_steal<py::object>(told(describe_call, given));
    if (!description)
        throw py::error_already_set();
    try {
        return call_from(description);
    } catch (const py::cast_error &) { // an argument that PyTorch's C++ takes in another form
    } catch (const c10::Error &) {
    }
    return nullptr;
}

// Calls ------------------------------------------------------------------------------------------

at::Tensor tensor_for(const Argument &argument, const std::vector<at::Tensor> &tensors) {
    const at::Tensor &tensor = tensors.at(argument.number);
    switch (argument.form) {
    case Form::complex:
        return at::view_as_complex(tensor);
    case Form::channels_last:
        return tensor.permute({0, 3, 1, 2});
    case Form::view:
        return tensor.as_strided(argument.sizes, argument.strides, argument.offset);
    default:
        return tensor;
    }
}

c10::IValue value_of(const Argument &argument, const std::vector<at::Tensor> &tensors) {
    if (argument.form == Form::constant)
        return argument.constant;
    if (argument.form != Form::list)
        return tensor_for(argument, tensors);
    c10::impl::GenericList list(argument.element);
    for (const Argument &item : argument.items)
        list.push_back(value_of(item, tensors));
    return list;
}

// The result as a dense, aligned tensor that shares no memory with the operands, as own() in results.py.
at::Tensor own(const at::Tensor &result, const std::vector<at::Tensor> &operands) {
    if (result.numel() == 0)
        return at::empty(result.sizes(), result.options());
    at::Tensor dense = result.contiguous();
    if (dense.is_neg())
        return dense.resolve_neg();
    if (dense._is_zerotensor())
        return at::zeros_like(dense);
    bool lent = reinterpret_cast<uintptr_t>(dense.data_ptr()) % 64 != 0;
    for (const at::Tensor &operand : operands)
        lent = lent || operand.storage().data() == dense.storage().data();
    return lent ? dense.clone() : dense;
}

// The result that the graph wants; undefined if it is not as declared.
at::Tensor taken(const c10::IValue &value, const Wanted &wanted, const std::vector<at::Tensor> &operands) {
    if (!value.isTensor() || !value.toTensor().defined())
        return at::Tensor();
    at::Tensor result = value.toTensor();
    if (wanted.channels_last)
        result = result.permute({0, 2, 3, 1});
    bool is_with = operands.empty() ? result.is_cpu() || result.is_cuda() : result.device() == operands[0].device();
    if (result.is_complex())
        result = at::view_as_real(result.resolve_conj());
    if (!is_with || result.sizes() != at::IntArrayRef(wanted.shape) || result.scalar_type() != wanted.dtype)
        return at::Tensor();
    at::Tensor owned = own(result, operands);
    if (owned.is_cuda())
        note_storage(owned);
    return owned;
}

void hand_over(const std::vector<at::Tensor> &tensors, TVMFFIAny *result) {
    static TVMFFIObjectHandle array = [] {
        TVMFFIObjectHandle handle = nullptr;
        TVMFFIByteArray name{"ffi.Array", 9};
        TVMFFIFunctionGetGlobal(&name, &handle);
        return handle;
    }();
    std::vector<TVMFFIAny> items(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i)
        hand_over(tensors[i], &items[i]);
    int code = TVMFFIFunctionCall(array, items.data(), (int32_t)items.size(), result);
    for (TVMFFIAny &item : items)
        TVMFFIObjectDecRef(item.v_obj);
    TORCH_CHECK(code == 0, "the results of PyTorch's kernel cannot be handed over");
}

// Whether the call was made; if not, Python runs it, and raises what there is to say about its results.
bool call_aten(const Given &given, TVMFFIAny *result) {
    std::shared_ptr<const AtenCall> call = calls.get(given, described_call);
    if (call == nullptr)
        return false;
    std::vector<at::Tensor> tensors;
    for (int32_t i = 0; i < given.count; ++i)
        tensors.push_back(tensor_of(given.tensors[i], std::nullopt));
    torch::jit::Stack stack;
    stack.reserve(call->arguments.size());
    for (const Argument &argument : call->arguments)
        stack.push_back(value_of(argument, tensors));
    call->operation.callBoxed(&stack);
    std::vector<at::Tensor> results;
    for (const Wanted &wanted : call->results) {
        bool is_list = stack.size() == 1 && stack[0].isTensorList();
        size_t last = is_list ? stack[0].toTensorList().size() : stack.size();
        if (wanted.position >= last)
            return false;
        results.push_back(taken(is_list ? c10::IValue(stack[0].toTensorList().get(wanted.position))
                                        : stack[wanted.position], wanted, tensors));
        if (!results.back().defined())
            return false;
    }
    if (call->several)
        hand_over(results, result);
    else
        hand_over(results.at(0), result);
    return true;
}

// Give the exception that is being handled to Python, as the same exception that PyTorch would raise there.
PyObject *raise_in_python() {
    HANDLE_TH_ERRORS
    throw;
    END_HANDLE_TH_ERRORS
}

template <bool sized> int called_aten(void *, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    try {
        bool done = false;
        {
            torch::PyWarningHandler warnings; // its end gives the kernel's warnings to Python
            try {
                c10::AutoGradMode gradients(false);
                done = call_aten(given_in(args, count, sized), result);
            } catch (...) {
                warnings.set_in_exception();
                throw;
            }
        }
        return done ? 0 : TVMFFIFunctionCall(in_python[sized], const_cast<TVMFFIAny *>(args), count, result);
    } catch (...) {
        py::gil_scoped_acquire interpreter;
        raise_in_python();
    }
    TVMFFIErrorSetRaisedFromCStr("EnvErrorAlreadySet", "");
    return -1;
}

// Make ATen calls known to TVM by a name in place of Python's function, which is kept.
template <bool sized> bool replace_global(const std::string &name) {
    TVMFFIByteArray words{name.data(), name.size()};
    if (in_python[sized] == nullptr && TVMFFIFunctionGetGlobal(&words, &in_python[sized]) != 0)
        return false;
    return in_python[sized] != nullptr && set_global(name, called_aten<sized>);
}

} // namespace
