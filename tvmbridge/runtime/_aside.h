// The native part of dispatcher.py for calls that the module's own forward serves after a speed trial:
// _native.cpp includes it. An Aside is such a call; a Forward is the base of a dispatcher's class, and calls
// the own forward if a call is like one of its Asides. Otherwise it calls the dispatcher's __call__.

#pragma once

constexpr Py_ssize_t kMostArguments = 8;

// Aside ------------------------------------------------------------------------------------------

// One argument: a tensor by its properties, or the object itself.
struct Expected {
    PyObject *object; // nullptr for a tensor; owned by `held` of the Aside
    std::vector<Properties> tensor;

    bool holds(PyObject *given, bool of_any_size) const {
        if (object != nullptr)
            return object == given;
        return of_any_size ? tensor[0].resembles(given) : tensor[0].hold(given);
    }
};

struct Aside {
    PyObject_HEAD
    PyObject *module;     // the first argument of `function`; nullptr if that takes none
    PyObject *function;   // the own forward
    PyObject *attributes; // the module's dictionary
    PyObject *training;   // the module's mode
    PyObject *names;      // tuple of the keywords
    PyObject *hooks;      // function that returns None where autograd saves tensors as usual; or None
    PyObject *held;       // tuple of the arguments that are no tensors
    std::vector<Expected> *expected; // the positional arguments, then those of `names`
    Py_ssize_t positional;
    bool of_any_size; // of about as many elements
    bool gradients;
    c10::impl::PODLocalDispatchKeySet keys;
    unsigned long long calls;
};

PyObject *word_training = nullptr;
PyObject *word_forward = nullptr;

int aside_traverse(Aside *self, visitproc visit, void *arg) {
    for (PyObject *each : {self->module, self->function, self->attributes, self->training, self->names,
                           self->hooks, self->held})
        Py_VISIT(each);
    return 0;
}

int aside_clear(Aside *self) {
    delete self->expected;
    self->expected = nullptr;
    for (PyObject **each : {&self->module, &self->function, &self->attributes, &self->training,
                            &self->names, &self->hooks, &self->held})
        Py_CLEAR(*each);
    return 0;
}

void aside_dealloc(Aside *self) {
    PyObject_GC_UnTrack(self);
    aside_clear(self);
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject *>(self));
}

c10::impl::PODLocalDispatchKeySet local_keys() {
    c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    c10::impl::PODLocalDispatchKeySet keys{};
    keys.set_included(now.included_);
    keys.set_excluded(now.excluded_);
    return keys;
}

bool same_keys(const c10::impl::PODLocalDispatchKeySet &before) {
    c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    return now.included_ == before.included() && now.excluded_ == before.excluded();
}

// Adds an argument; false with an exception set.
bool expect(Aside *self, PyObject *held, PyObject *object) {
    Expected one{nullptr, {}};
    if (THPVariable_Check(object)) {
        if (!is_plain(object))
            return false;
        one.tensor.emplace_back(object, THPVariable_Unpack(object).unsafeGetTensorImpl());
    } else {
        one.object = object;
        if (PyList_Append(held, object) < 0)
            return false;
    }
    self->expected->push_back(std::move(one));
    return true;
}

bool expect_all(Aside *self, PyObject *held, PyObject *args, PyObject *kwargs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!expect(self, held, PyTuple_GET_ITEM(args, i)))
            return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->names); i++)
        if (!expect(self, held, PyDict_GetItem(kwargs, PyTuple_GET_ITEM(self->names, i))))
            return false;
    return true;
}

PyObject *aside_new(PyTypeObject *type, PyObject *given, PyObject *) {
    PyObject *module, *function, *attributes, *args, *kwargs, *hooks;
    int of_any_size;
    if (!PyArg_ParseTuple(given, "OOO!O!O!Op", &module, &function, &PyDict_Type, &attributes, &PyTuple_Type,
                          &args, &PyDict_Type, &kwargs, &hooks, &of_any_size))
        return nullptr;
    if (PyTuple_GET_SIZE(args) > kMostArguments) {
        PyErr_SetString(PyExc_TypeError, "too many positional arguments");
        return nullptr;
    }
    auto *self = reinterpret_cast<Aside *>(type->tp_alloc(type, 0));
    if (self == nullptr)
        return nullptr;
    self->module = module == Py_None ? nullptr : Py_NewRef(module);
    self->function = Py_NewRef(function);
    self->attributes = Py_NewRef(attributes);
    self->training = Py_XNewRef(PyDict_GetItemWithError(attributes, word_training));
    self->hooks = Py_NewRef(hooks);
    self->expected = new std::vector<Expected>();
    self->positional = PyTuple_GET_SIZE(args);
    self->of_any_size = of_any_size;
    self->gradients = at::GradMode::is_enabled();
    self->keys = local_keys();
    PyObject *keywords = PyDict_Keys(kwargs);
    PyObject *held = PyList_New(0);
    if (keywords != nullptr && held != nullptr && (self->names = PyList_AsTuple(keywords)) != nullptr &&
        expect_all(self, held, args, kwargs))
        self->held = PyList_AsTuple(held);
    Py_XDECREF(keywords);
    Py_XDECREF(held);
    if (self->held == nullptr) {
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

// Whether the own forward is that of the module's class, as it was.
bool same_forward(const Aside *self) {
    return self->module == nullptr || _PyType_Lookup(Py_TYPE(self->module), word_forward) == self->function;
}

// Whether autograd saves tensors as usual. An exception may be set if not.
bool saves_as_usual(const Aside *self) {
    if (self->hooks == Py_None)
        return true;
    PyObject *answer = PyObject_CallOneArg(self->hooks, Py_True);
    Py_XDECREF(answer);
    return answer == Py_None;
}

bool aside_fits(const Aside *self, PyObject *args, PyObject *kwargs) {
    Py_ssize_t named = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs);
    if (self->expected == nullptr || PyTuple_GET_SIZE(args) != self->positional ||
        named != PyTuple_GET_SIZE(self->names))
        return false;
    if (at::GradMode::is_enabled() != self->gradients || !same_keys(self->keys) || !same_forward(self) ||
        PyDict_GetItemWithError(self->attributes, word_training) != self->training)
        return false;
    for (Py_ssize_t i = 0; i < self->positional; i++)
        if (!(*self->expected)[i].holds(PyTuple_GET_ITEM(args, i), self->of_any_size))
            return false;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *value = PyDict_GetItemWithError(kwargs, PyTuple_GET_ITEM(self->names, i));
        if (value == nullptr ||
            !(*self->expected)[self->positional + i].holds(value, self->of_any_size))
            return false;
    }
    return saves_as_usual(self);
}

PyObject *aside_run(Aside *self, PyObject *args, PyObject *kwargs) {
    self->calls++;
    if (self->module == nullptr)
        return PyObject_Call(self->function, args, kwargs);
    PyObject *stack[kMostArguments + 1] = {self->module};
    for (Py_ssize_t i = 0; i < self->positional; i++)
        stack[i + 1] = PyTuple_GET_ITEM(args, i);
    return PyObject_VectorcallDict(self->function, stack, self->positional + 1, kwargs);
}

PyMemberDef aside_members[] = {
    {"calls", T_ULONGLONG, offsetof(Aside, calls), READONLY, "The number of calls served."},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject AsideType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Forward ----------------------------------------------------------------------------------------

struct Forward {
    PyObject_HEAD
    PyObject *asides; // list that the dispatcher's executor changes
    PyObject *slow;   // function: __call__ of the class
    Py_ssize_t references; // to a forward during a call, if no copy of the module holds it
};

int forward_traverse(Forward *self, visitproc visit, void *arg) {
    Py_VISIT(self->asides);
    Py_VISIT(self->slow);
    return 0;
}

int forward_clear(Forward *self) {
    Py_CLEAR(self->asides);
    Py_CLEAR(self->slow);
    return 0;
}

void forward_dealloc(Forward *self) {
    PyObject_GC_UnTrack(self);
    forward_clear(self);
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject *>(self));
}

PyObject *forward_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    auto *self = reinterpret_cast<Forward *>(object);
    if (self->references == 0) // not connected
        return PyLong_FromSsize_t(Py_REFCNT(object));
    if (self->slow == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "cleared by the garbage collector");
        return nullptr;
    }
    Py_ssize_t count = Py_REFCNT(object) > self->references ? 0 : PyList_GET_SIZE(self->asides);
    for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(self->asides); i++) {
        PyObject *aside = Py_NewRef(PyList_GET_ITEM(self->asides, i));
        bool fits = aside_fits(reinterpret_cast<Aside *>(aside), args, kwargs);
        PyObject *results = fits ? aside_run(reinterpret_cast<Aside *>(aside), args, kwargs) : nullptr;
        Py_DECREF(aside);
        if (fits || PyErr_Occurred())
            return results;
    }
    Py_ssize_t given = PyTuple_GET_SIZE(args);
    std::vector<PyObject *> stack(given + 1, object);
    for (Py_ssize_t i = 0; i < given; i++)
        stack[i + 1] = PyTuple_GET_ITEM(args, i);
    return PyObject_VectorcallDict(self->slow, stack.data(), given + 1, kwargs);
}

PyObject *forward_connect(Forward *self, PyObject *args) {
    PyObject *asides, *slow;
    Py_ssize_t references;
    if (!PyArg_ParseTuple(args, "O!On", &PyList_Type, &asides, &slow, &references))
        return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(asides); i++)
        if (Py_TYPE(PyList_GET_ITEM(asides, i)) != &AsideType) {
            PyErr_SetString(PyExc_TypeError, "expected a list of Aside");
            return nullptr;
        }
    Py_XSETREF(self->asides, Py_NewRef(asides));
    Py_XSETREF(self->slow, Py_NewRef(slow));
    self->references = references;
    Py_RETURN_NONE;
}

PyMethodDef forward_methods[] = {
    {"connect", reinterpret_cast<PyCFunction>(forward_connect), METH_VARARGS,
     "connect(asides, slow, references)\n--\n\nSets the list of Aside and the function for other calls."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject ForwardType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Functions --------------------------------------------------------------------------------------

// The class keeps its __call__ in Python, which TorchDynamo reads; calls run forward_call.
PyObject *take_calls(PyObject *, PyObject *type) {
    if (!PyType_Check(type) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject *>(type), &ForwardType)) {
        PyErr_SetString(PyExc_TypeError, "expected a subclass of Forward");
        return nullptr;
    }
    reinterpret_cast<PyTypeObject *>(type)->tp_call = forward_call;
    Py_RETURN_NONE;
}

bool prepare_asides() {
    word_training = PyUnicode_InternFromString("training");
    word_forward = PyUnicode_InternFromString("forward");
    AsideType.tp_name = "tvmbridge.runtime._native.Aside";
    AsideType.tp_doc = "Aside(module, function, attributes, args, kwargs, hooks, of_any_size)\n--\n\n"
                       "Calls like this one, in the modes that PyTorch has now. Tensors must have\n"
                       "the same sizes, or, if of_any_size, about as many elements.";
    AsideType.tp_basicsize = sizeof(Aside);
    AsideType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    AsideType.tp_new = aside_new;
    AsideType.tp_dealloc = reinterpret_cast<destructor>(aside_dealloc);
    AsideType.tp_traverse = reinterpret_cast<traverseproc>(aside_traverse);
    AsideType.tp_clear = reinterpret_cast<inquiry>(aside_clear);
    AsideType.tp_members = aside_members;
    ForwardType.tp_name = "tvmbridge.runtime._native.Forward";
    ForwardType.tp_doc = "The base of a class whose objects are forwards of modules. Before connect, a call\n"
                         "returns the number of references to the object.";
    ForwardType.tp_basicsize = sizeof(Forward);
    ForwardType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
    ForwardType.tp_new = PyType_GenericNew;
    ForwardType.tp_dealloc = reinterpret_cast<destructor>(forward_dealloc);
    ForwardType.tp_traverse = reinterpret_cast<traverseproc>(forward_traverse);
    ForwardType.tp_clear = reinterpret_cast<inquiry>(forward_clear);
    ForwardType.tp_methods = forward_methods;
    return word_training != nullptr && word_forward != nullptr && PyType_Ready(&AsideType) == 0 &&
           PyType_Ready(&ForwardType) == 0;
}
