/* The compiled half of guards/watch.py: asks in one call whether dictionaries, classes of objects and
   the memory of tensors are what they were. Built where there is a C compiler; without it the same
   questions are asked in Python.

   Dictionaries are compared by their version (PEP 509), which CPython has up to 3.12. The memory of
   tensors is read through the C exchange API of DLPack 1.2 and later, whose structures are declared
   here as its specification has them, so that no headers but Python's are needed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if PY_VERSION_HEX >= 0x030D0000
#error "dictionaries have no version from Python 3.13 on; guards/watch.py compares them itself"
#endif

typedef struct {
    int32_t type;
    int32_t index;
} Device;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DataType;

typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    uint32_t major;
    uint32_t minor;
    void *previous;
    void *allocate;
    void *managed_from_object;
    void *managed_to_object;
    int (*tensor_from_object)(void *object, Tensor *out);
} ExchangeApi;

/* The table that the type of tensors has as a capsule; NULL with an exception where it has none. */
static ExchangeApi *
exchange_api(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL)
        return NULL;
    ExchangeApi *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the table lives as long as the process */
    if (api != NULL && (api->major != 1 || api->tensor_from_object == NULL)) {
        PyErr_SetString(PyExc_ImportError, "an unknown version of DLPack's exchange API");
        return NULL;
    }
    return api;
}

typedef struct {
    PyObject_HEAD
    PyObject *dicts;   /* tuple of dict */
    PyObject *objects; /* tuple */
    PyObject *tensors; /* tuple of tensors */
    uint64_t *versions;
    PyTypeObject **types; /* borrowed: compared, never read */
    void **pointers;
    ExchangeApi *api;
} Watch;

static uint64_t
version_of(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030C0000
    /* The lowest bits say who watches the dictionary. */
    _Py_COMP_DIAG_PUSH
    _Py_COMP_DIAG_IGNORE_DEPR_DECLS
    return ((PyDictObject *)dict)->ma_version_tag >> 8;
    _Py_COMP_DIAG_POP
#else
    return ((PyDictObject *)dict)->ma_version_tag;
#endif
}

static int
pointer_of(ExchangeApi *api, PyObject *object, void **pointer)
{
    Tensor tensor;
    if (api->tensor_from_object(object, &tensor) != 0)
        return -1;
    *pointer = (char *)tensor.data + tensor.byte_offset;
    return 0;
}

static void
watch_clear_memory(Watch *self)
{
    PyMem_Free(self->versions);
    PyMem_Free(self->types);
    PyMem_Free(self->pointers);
    self->versions = NULL;
    self->types = NULL;
    self->pointers = NULL;
}

static int
watch_traverse(Watch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->dicts);
    Py_VISIT(self->objects);
    Py_VISIT(self->tensors);
    return 0;
}

static int
watch_clear(Watch *self)
{
    Py_CLEAR(self->dicts);
    Py_CLEAR(self->objects);
    Py_CLEAR(self->tensors);
    return 0;
}

static void
watch_dealloc(Watch *self)
{
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    watch_clear_memory(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dicts", "objects", "tensors", "tensor_type", NULL};
    PyObject *dicts, *objects, *tensors, *tensor_type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O", names, &PyTuple_Type, &dicts,
                                     &PyTuple_Type, &objects, &PyTuple_Type, &tensors,
                                     &tensor_type))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(dicts, i))) {
            PyErr_SetString(PyExc_TypeError, "dicts must hold dictionaries");
            return NULL;
        }
    }
    ExchangeApi *api = exchange_api(tensor_type);
    if (api == NULL)
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->api = api;
    self->dicts = Py_NewRef(dicts);
    self->objects = Py_NewRef(objects);
    self->tensors = Py_NewRef(tensors);
    Py_ssize_t num_dicts = PyTuple_GET_SIZE(dicts), num_objects = PyTuple_GET_SIZE(objects);
    Py_ssize_t num_tensors = PyTuple_GET_SIZE(tensors);
    self->versions = PyMem_New(uint64_t, num_dicts);
    self->types = PyMem_New(PyTypeObject *, num_objects);
    self->pointers = PyMem_New(void *, num_tensors);
    if (self->versions == NULL || self->types == NULL || self->pointers == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < num_dicts; i++)
        self->versions[i] = version_of(PyTuple_GET_ITEM(dicts, i));
    for (Py_ssize_t i = 0; i < num_objects; i++)
        self->types[i] = Py_TYPE(PyTuple_GET_ITEM(objects, i));
    for (Py_ssize_t i = 0; i < num_tensors; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        int known = PyObject_IsInstance(tensor, tensor_type);
        if (known == 0)
            PyErr_SetString(PyExc_TypeError, "tensors must hold tensors");
        if (known != 1 || pointer_of(api, tensor, &self->pointers[i]) != 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyObject *
watch_unchanged(Watch *self, PyObject *Py_UNUSED(ignored))
{
    /* Without branches, so that the loads, most of which miss the cache, overlap. */
    uint64_t changed = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(self->dicts);
    PyObject **items = ((PyTupleObject *)self->dicts)->ob_item;
    for (Py_ssize_t i = 0; i < count; i++)
        changed |= version_of(items[i]) ^ self->versions[i];
    count = PyTuple_GET_SIZE(self->objects);
    items = ((PyTupleObject *)self->objects)->ob_item;
    for (Py_ssize_t i = 0; i < count; i++)
        changed |= (uintptr_t)Py_TYPE(items[i]) ^ (uintptr_t)self->types[i];
    if (changed)
        Py_RETURN_FALSE;
    count = PyTuple_GET_SIZE(self->tensors);
    for (Py_ssize_t i = 0; i < count; i++) {
        void *pointer;
        if (pointer_of(self->api, PyTuple_GET_ITEM(self->tensors, i), &pointer) != 0) {
            PyErr_Clear(); /* it has become a tensor without memory of its own */
            Py_RETURN_FALSE;
        }
        if (pointer != self->pointers[i])
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef watch_methods[] = {
    {"unchanged", (PyCFunction)watch_unchanged, METH_NOARGS,
     "unchanged() -> bool\n--\n\nWhether all is as it was when this was made."},
    {NULL},
};

static PyTypeObject WatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tvmbridge.runtime._native.Watch",
    .tp_doc = "Watch(dicts, objects, tensors, tensor_type)\n--\n\n"
              "Remembers versions of dicts, classes of objects, and addresses of tensors.",
    .tp_basicsize = sizeof(Watch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = watch_new,
    .tp_dealloc = (destructor)watch_dealloc,
    .tp_traverse = (traverseproc)watch_traverse,
    .tp_clear = (inquiry)watch_clear,
    .tp_methods = watch_methods,
};

static PyObject *version_name;

static PyObject *
versions(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    if (!PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "versions takes a tuple of tensors");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    PyObject *found = PyTuple_New(count);
    if (found == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *version = PyObject_GetAttr(PyTuple_GET_ITEM(tensors, i), version_name);
        if (version == NULL) {
            Py_DECREF(found);
            return NULL;
        }
        PyTuple_SET_ITEM(found, i, version);
    }
    return found;
}

static PyMethodDef functions[] = {
    {"versions", versions, METH_O,
     "versions(tensors) -> tuple\n--\n\nHow often each tensor of a tuple was written."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tvmbridge.runtime._native",
    .m_doc = "The compiled half of tvmbridge.runtime.guards.watch.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    version_name = PyUnicode_InternFromString("_version");
    if (version_name == NULL || PyType_Ready(&WatchType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, "Watch", (PyObject *)&WatchType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
