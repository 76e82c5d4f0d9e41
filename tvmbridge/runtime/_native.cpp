// The native part of guards/watch.py: checks in one call that dictionaries, objects and tensors
// are unchanged; and, in _aside.h, that of dispatcher.py. core/compiled_half.py compiles it; if that is not possible, the same checks run in Python.
//
// Dictionaries are compared by a version: up to Python 3.11 the one that CPython counts (PEP 509), from 3.12
// on one that this file counts, which CPython notifies of each change. With a new version, the keys and
// values are compared. Python 3.13 does not notify of an attribute that is set on an object whose dictionary
// shares the object's own memory: of these dictionaries keys and values are always compared. The object is
// only right for the PyTorch that it was built for: core/compiled_half.py compares TORCH_VERSION first.

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <structmember.h>

#include <bit>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr uintptr_t kAlignment = 64;

// Versions of dictionaries -------------------------------------------------------------------------

#if PY_VERSION_HEX >= 0x030C0000

struct Counted {
    uint64_t version;
    size_t users;
};

// Versions by dictionary; a Watch keeps each dictionary alive. Accessed only with the interpreter's lock.
std::unordered_map<PyObject *, Counted> counted;
int watcher = -1;

int count_change(PyDict_WatchEvent, PyObject *dict, PyObject *, PyObject *) {
    auto place = counted.find(dict);
    if (place != counted.end())
        ++place->second.version;
    return 0;
}

bool start_counting() {
    watcher = PyDict_AddWatcher(count_change);
    return watcher >= 0;
}

// Starts counting changes of `dict`. Returns the address of its version, which is valid until stop_counting;
// nullptr with an exception set.
const uint64_t *begin_to_count(PyObject *dict) {
    if (PyDict_Watch(watcher, dict) < 0)
        return nullptr;
    Counted &place = counted[dict];
    ++place.users;
    return &place.version;
}

void stop_counting(PyObject *dict) {
    auto place = counted.find(dict);
    if (place == counted.end() || --place->second.users > 0)
        return;
    counted.erase(place);
    if (PyDict_Unwatch(watcher, dict) < 0)
        PyErr_Clear();
}

#else

bool start_counting() { return true; }

const uint64_t *begin_to_count(PyObject *dict) {
    return &reinterpret_cast<PyDictObject *>(dict)->ma_version_tag;
}

void stop_counting(PyObject *) {}

#endif

// Whether the values of `dict` may change without a new version.
bool changes_unnoticed([[maybe_unused]] PyObject *dict) {
#if PY_VERSION_HEX >= 0x030D0000
    return reinterpret_cast<PyDictObject *>(dict)->ma_values != nullptr;
#else
    return false;
#endif
}

// Appends the keys and values of `dict` to a list.
bool append_entries(PyObject *list, PyObject *dict) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);)
        if (PyList_Append(list, key) < 0 || PyList_Append(list, value) < 0)
            return false;
    return true;
}

uintptr_t address_of(const c10::TensorImpl *impl) {
    if (!impl->has_storage())
        return 0;
    auto begin = reinterpret_cast<uintptr_t>(impl->unsafe_storage().data());
    return begin + impl->storage_offset() * impl->itemsize();
}

// The properties of a tensor that compiled code depends on, except for its values.
struct Properties {
    PyTypeObject *type; // borrowed: compared, never read
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::Device device;
    bool requires_grad;
    bool aligned;
    int width; // the bits of the number of elements
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;

    explicit Properties(PyObject *object, const c10::TensorImpl *impl)
        : type(Py_TYPE(object)), keys(impl->key_set()), dtype(impl->dtype()),
          device(impl->device()), requires_grad(impl->requires_grad()),
          aligned(address_of(impl) % kAlignment == 0),
          width(std::bit_width(uint64_t(impl->numel()))), shape(impl->sizes().vec()),
          strides(impl->strides().vec()) {}

    // The same but for sizes: as many dimensions, and about as many elements.
    bool resembles(PyObject *object) const {
        if (Py_TYPE(object) != type)
            return false;
        const c10::TensorImpl *impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
        return impl->key_set() == keys && impl->dtype() == dtype && impl->device() == device &&
               impl->requires_grad() == requires_grad && impl->dim() == int64_t(shape.size()) &&
               std::bit_width(uint64_t(impl->numel())) == width;
    }

    bool hold(PyObject *object) const {
        // The class first: only then is it known to be a tensor.
        if (Py_TYPE(object) != type)
            return false;
        const c10::TensorImpl *impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
        return impl->key_set() == keys && impl->dtype() == dtype && impl->device() == device &&
               impl->requires_grad() == requires_grad && impl->sizes() == shape &&
               impl->strides() == strides && (!aligned || address_of(impl) % kAlignment == 0);
    }
};

bool is_plain(PyObject *object) {
    if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "expected tensors");
        return false;
    }
    const c10::TensorImpl *impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
    if (impl->layout() != c10::kStrided || !impl->has_storage()) {
        PyErr_SetString(PyExc_TypeError, "expected tensors with memory of their own");
        return false;
    }
    return true;
}

// Watch ------------------------------------------------------------------------------------------

// The entries of one dictionary that matter, or a function that compares them.
struct Part {
    PyObject *dict;     // borrowed from `places` or `asked`
    PyObject *function; // borrowed from `asked`, or null
    Py_ssize_t begin, end;
    const uint64_t *counter; // null where the dictionary may change without a new version
    uint64_t version;        // the dictionary's version when the entries were last found unchanged
};

PyObject *no_dict = nullptr; // for objects without a dictionary

struct Watched {
    std::vector<const uint64_t *> counters; // addresses of the versions of `dicts`, in order
    std::vector<uint64_t> versions;  // when the entries were last found unchanged
    std::vector<Py_ssize_t> ends;    // where the entries of each of `dicts` end in `entries`
    std::vector<Py_ssize_t> unnoticed; // numbers of those that may change without a new version
    std::vector<Part> parts;
    std::vector<PyTypeObject *> types;
    std::vector<PyObject **> places; // where each of `objects` has its dictionary
    std::vector<PyObject *> holders; // the dictionaries there, borrowed: compared, never read
    std::vector<Properties> tensors;
    std::vector<uintptr_t> addresses;
};

struct Watch {
    PyObject_HEAD
    PyObject *dicts;
    PyObject *objects;
    PyObject *tensors;
    PyObject *places;    // tuple of (dict, key, value)
    PyObject *functions; // tuple of (function, code, defaults or None)
    PyObject *asked;     // tuple of (dict, function that returns whether it is unchanged, None)
    PyObject *missing;   // the object MISSING, for a key without a value
    PyObject *entries;   // list of the keys and values of `dicts`
    Watched *watched;
};

int watch_traverse(Watch *self, visitproc visit, void *arg) {
    Py_VISIT(self->dicts);
    Py_VISIT(self->objects);
    Py_VISIT(self->tensors);
    Py_VISIT(self->places);
    Py_VISIT(self->functions);
    Py_VISIT(self->asked);
    Py_VISIT(self->missing);
    Py_VISIT(self->entries);
    return 0;
}

void forget_dicts(Watch *self) {
    if (self->watched == nullptr)
        return;
    for (const Part &part : self->watched->parts)
        if (part.counter != nullptr)
            stop_counting(part.dict);
    self->watched->parts.clear();
    for (size_t i = 0; i < self->watched->counters.size(); i++)
        stop_counting(PyTuple_GET_ITEM(self->dicts, i));
    self->watched->counters.clear();
    self->watched->versions.clear();
}

int watch_clear(Watch *self) {
    forget_dicts(self);
    Py_CLEAR(self->dicts);
    Py_CLEAR(self->objects);
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->places);
    Py_CLEAR(self->functions);
    Py_CLEAR(self->asked);
    Py_CLEAR(self->missing);
    Py_CLEAR(self->entries);
    return 0;
}

void watch_dealloc(Watch *self) {
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    delete self->watched;
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject *>(self));
}

// Whether `items` holds triples that each begin with an object of class `first`.
bool all_triples(PyObject *items, PyTypeObject *first) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3 ||
            !PyObject_TypeCheck(PyTuple_GET_ITEM(item, 0), first)) {
            PyErr_SetString(PyExc_TypeError, "expected triples of an object and what it has");
            return false;
        }
    }
    return true;
}

// Whether a dictionary has the same keys and values, in the same order.
bool entries_hold(Watch *self, Py_ssize_t number) {
    Watched &before = *self->watched;
    uint64_t version = *before.counters[number];
    Py_ssize_t next = number == 0 ? 0 : before.ends[number - 1];
    PyObject *key, *value, *dict = PyTuple_GET_ITEM(self->dicts, number);
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value); next += 2)
        if (next >= before.ends[number] || PyList_GET_ITEM(self->entries, next) != key ||
            PyList_GET_ITEM(self->entries, next + 1) != value)
            return false;
    if (next != before.ends[number])
        return false;
    before.versions[number] = version;
    return true;
}

// Whether all dictionaries have the same entries, of which some may have been others meanwhile.
bool all_entries_hold(Watch *self) {
    Watched &before = *self->watched;
    for (size_t i = 0; i < before.versions.size(); i++)
        if (*before.counters[i] != before.versions[i] && !entries_hold(self, i))
            return false;
    return true;
}

bool place_holds(const Watch *self, PyObject *place) {
    PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1));
    if (value == nullptr) {
        PyErr_Clear();
        value = self->missing;
    }
    return value == PyTuple_GET_ITEM(place, 2);
}

bool function_holds(PyObject *item) {
    PyObject *function = PyTuple_GET_ITEM(item, 0);
    PyObject *defaults = PyFunction_GET_DEFAULTS(function);
    return PyFunction_GET_CODE(function) == PyTuple_GET_ITEM(item, 1) &&
           (defaults == nullptr ? Py_None : defaults) == PyTuple_GET_ITEM(item, 2);
}

// Adds the part of a dictionary; false with an exception set.
bool add_part(Watch *self, PyObject *dict, PyObject *function, Py_ssize_t begin) {
    Part part{dict, function, begin, begin, nullptr, 0};
    if (!changes_unnoticed(dict)) {
        part.counter = begin_to_count(dict);
        if (part.counter == nullptr)
            return false;
        part.version = *part.counter;
    }
    self->watched->parts.push_back(part);
    return true;
}

// Consecutive places of the same dictionary form one part.
bool find_parts(Watch *self) {
    std::vector<Part> &parts = self->watched->parts;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->places); i++) {
        PyObject *dict = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->places, i), 0);
        if ((parts.empty() || parts.back().dict != dict) && !add_part(self, dict, nullptr, i))
            return false;
        parts.back().end = i + 1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->asked); i++) {
        PyObject *item = PyTuple_GET_ITEM(self->asked, i);
        if (!add_part(self, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), 0))
            return false;
    }
    return true;
}

// Compares the entries that matter if the dictionary may have changed.
bool part_holds(const Watch *self, Part &part) {
    uint64_t version = part.counter == nullptr ? 0 : *part.counter;
    if (part.counter != nullptr && version == part.version)
        return true;
    for (Py_ssize_t i = part.begin; i < part.end; i++)
        if (!place_holds(self, PyTuple_GET_ITEM(self->places, i)))
            return false;
    if (part.function != nullptr) {
        PyObject *answer = PyObject_CallNoArgs(part.function);
        bool holds = answer == Py_True;
        Py_XDECREF(answer);
        // An interrupt stays set, and is raised by the caller.
        if (answer == nullptr && PyErr_ExceptionMatches(PyExc_Exception))
            PyErr_Clear();
        if (!holds)
            return false;
    }
    part.version = version;
    return true;
}

PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *dicts, *objects, *tensors, *places, *functions, *asked, *missing;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O", &PyTuple_Type, &dicts, &PyTuple_Type, &objects,
                          &PyTuple_Type, &tensors, &PyTuple_Type, &places, &PyTuple_Type,
                          &functions, &PyTuple_Type, &asked, &missing))
        return nullptr;
    if (!all_triples(places, &PyDict_Type) || !all_triples(functions, &PyFunction_Type) ||
        !all_triples(asked, &PyDict_Type))
        return nullptr;
    auto *self = reinterpret_cast<Watch *>(type->tp_alloc(type, 0));
    if (self == nullptr)
        return nullptr;
    self->dicts = Py_NewRef(dicts);
    self->objects = Py_NewRef(objects);
    self->tensors = Py_NewRef(tensors);
    self->places = Py_NewRef(places);
    self->functions = Py_NewRef(functions);
    self->asked = Py_NewRef(asked);
    self->missing = Py_NewRef(missing);
    self->watched = new Watched();
    self->entries = PyList_New(0);
    if (self->entries == nullptr) {
        Py_DECREF(self);
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++) {
        PyObject *dict = PyTuple_GET_ITEM(dicts, i);
        if (!PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "expected dictionaries");
            Py_DECREF(self);
            return nullptr;
        }
        const uint64_t *version = begin_to_count(dict);
        if (version == nullptr) {
            Py_DECREF(self);
            return nullptr;
        }
        self->watched->counters.push_back(version);
        self->watched->versions.push_back(*version);
        if (changes_unnoticed(dict))
            self->watched->unnoticed.push_back(i);
        if (!append_entries(self->entries, dict)) {
            Py_DECREF(self);
            return nullptr;
        }
        self->watched->ends.push_back(PyList_GET_SIZE(self->entries));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(objects); i++) {
        PyObject *object = PyTuple_GET_ITEM(objects, i);
        self->watched->types.push_back(Py_TYPE(object));
        // The address is fixed while the object lives, and `objects` keeps it alive.
        PyObject **place = _PyObject_GetDictPtr(object);
        self->watched->places.push_back(place == nullptr ? &no_dict : place);
        self->watched->holders.push_back(place == nullptr ? nullptr : *place);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (!is_plain(tensor)) {
            Py_DECREF(self);
            return nullptr;
        }
        const c10::TensorImpl *impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
        self->watched->tensors.emplace_back(tensor, impl);
        self->watched->addresses.push_back(address_of(impl));
    }
    if (!find_parts(self)) {
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

PyObject *watch_unchanged(Watch *self, PyObject *) {
    if (self->dicts == nullptr) // cleared by the garbage collector
        Py_RETURN_FALSE;
    // Without branches, so that the loads, most of which miss the cache, overlap.
    uint64_t changed = 0, others = 0;
    Watched &before = *self->watched;
    for (size_t i = 0; i < before.versions.size(); i++)
        changed |= *before.counters[i] ^ before.versions[i];
    PyObject **items = reinterpret_cast<PyTupleObject *>(self->objects)->ob_item;
    for (size_t i = 0; i < before.types.size(); i++)
        others |= uint64_t(Py_TYPE(items[i]) != before.types[i]) |
                  uint64_t(*before.places[i] != before.holders[i]);
    if (others || (changed && !all_entries_hold(self)))
        Py_RETURN_FALSE;
    for (Py_ssize_t number : before.unnoticed)
        if (!entries_hold(self, number))
            Py_RETURN_FALSE;
    for (Part &part : before.parts)
        if (!part_holds(self, part)) {
            if (PyErr_Occurred())
                return nullptr;
            Py_RETURN_FALSE;
        }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->functions); i++)
        if (!function_holds(PyTuple_GET_ITEM(self->functions, i)))
            Py_RETURN_FALSE;
    items = reinterpret_cast<PyTupleObject *>(self->tensors)->ob_item;
    for (size_t i = 0; i < before.tensors.size(); i++) {
        if (!before.tensors[i].hold(items[i]))
            Py_RETURN_FALSE;
        if (address_of(THPVariable_Unpack(items[i]).unsafeGetTensorImpl()) != before.addresses[i])
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

PyMethodDef watch_methods[] = {
    {"unchanged", reinterpret_cast<PyCFunction>(watch_unchanged), METH_NOARGS,
     "unchanged() -> bool\n--\n\nWhether all is as it was when this was made."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject WatchType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Alike ------------------------------------------------------------------------------------------

struct Alike {
    PyObject_HEAD
    std::vector<Properties> *expected;
};

void alike_dealloc(Alike *self) {
    delete self->expected;
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject *>(self));
}

PyObject *alike_new(PyTypeObject *type, PyObject *args, PyObject *) {
    auto *self = reinterpret_cast<Alike *>(type->tp_alloc(type, 0));
    if (self == nullptr)
        return nullptr;
    self->expected = new std::vector<Properties>();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(args, i);
        if (!is_plain(tensor)) {
            Py_DECREF(self);
            return nullptr;
        }
        self->expected->emplace_back(tensor, THPVariable_Unpack(tensor).unsafeGetTensorImpl());
    }
    return reinterpret_cast<PyObject *>(self);
}

PyObject *alike_check(Alike *self, PyObject *const *given, Py_ssize_t count) {
    if (count != Py_ssize_t(self->expected->size()))
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(*self->expected)[i].hold(given[i]))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

PyMethodDef alike_methods[] = {
    {"check", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(alike_check)),
     METH_FASTCALL, "check(*tensors) -> bool\n--\n\nWhether they are like those of the beginning."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject AlikeType = {PyVarObject_HEAD_INIT(nullptr, 0)};

#include "_aside.h"

PyObject *versions(PyObject *, PyObject *tensors) {
    if (!PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of tensors");
        return nullptr;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    PyObject *found = PyTuple_New(count);
    if (found == nullptr)
        return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i);
        PyObject *number = nullptr;
        if (!THPVariable_Check(object)) {
            PyErr_SetString(PyExc_TypeError, "expected a tuple of tensors");
        } else {
            const at::Tensor &tensor = THPVariable_Unpack(object);
            if (tensor.is_inference())
                PyErr_SetString(PyExc_RuntimeError, "tensors of inference mode have no version");
            else
                number = PyLong_FromLongLong(tensor._version());
        }
        if (number == nullptr) {
            Py_DECREF(found);
            return nullptr;
        }
        PyTuple_SET_ITEM(found, i, number);
    }
    return found;
}

PyMethodDef functions[] = {
    {"versions", versions, METH_O,
     "versions(tensors) -> tuple\n--\n\nHow often each tensor of a tuple was written."},
    {"take_calls", take_calls, METH_O,
     "take_calls(type)\n--\n\nHas calls of a subclass of Forward run native code."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "tvmbridge.runtime._native",
    "The compiled half of tvmbridge.runtime.guards.watch.",
    -1,
    functions,
};

} // namespace

PyMODINIT_FUNC PyInit__native(void) {
    WatchType.tp_name = "tvmbridge.runtime._native.Watch";
    WatchType.tp_doc = "Watch(dicts, objects, tensors, places, functions, asked, missing)\n--\n\n"
                       "Remembers what they are.";
    WatchType.tp_basicsize = sizeof(Watch);
    WatchType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    WatchType.tp_new = watch_new;
    WatchType.tp_dealloc = reinterpret_cast<destructor>(watch_dealloc);
    WatchType.tp_traverse = reinterpret_cast<traverseproc>(watch_traverse);
    WatchType.tp_clear = reinterpret_cast<inquiry>(watch_clear);
    WatchType.tp_methods = watch_methods;
    AlikeType.tp_name = "tvmbridge.runtime._native.Alike";
    AlikeType.tp_doc = "Alike(*tensors)\n--\n\nRemembers all of them but values and addresses.";
    AlikeType.tp_basicsize = sizeof(Alike);
    AlikeType.tp_flags = Py_TPFLAGS_DEFAULT;
    AlikeType.tp_new = alike_new;
    AlikeType.tp_dealloc = reinterpret_cast<destructor>(alike_dealloc);
    AlikeType.tp_methods = alike_methods;
    if (!start_counting() || PyType_Ready(&WatchType) < 0 || PyType_Ready(&AlikeType) < 0 ||
        !prepare_asides())
        return nullptr;
    PyObject *module = PyModule_Create(&definition);
    if (module == nullptr)
        return nullptr;
    if (PyModule_AddObjectRef(module, "Watch", reinterpret_cast<PyObject *>(&WatchType)) < 0 ||
        PyModule_AddObjectRef(module, "Alike", reinterpret_cast<PyObject *>(&AlikeType)) < 0 ||
        PyModule_AddObjectRef(module, "Aside", reinterpret_cast<PyObject *>(&AsideType)) < 0 ||
        PyModule_AddObjectRef(module, "Forward", reinterpret_cast<PyObject *>(&ForwardType)) < 0 ||
        PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
