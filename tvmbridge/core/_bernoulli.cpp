// Masks of zeros and ones from PyTorch's generator of the CPU: the numbers that bernoulli_(p) draws where
// PyTorch runs its own loop, one by one, and the same state of the generator afterwards. Here a whole block
// of the Mersenne Twister is made at a time, in vectors. Built where there is a C++ compiler and PyTorch's
// headers; core/bernoulli.py compares it with PyTorch before it is used.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/Generator.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_PROCESSORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_PROCESSORS
#endif

namespace {

constexpr int64_t kWords = at::MERSENNE_STATE_N;
constexpr int64_t kShift = at::MERSENNE_STATE_M;
// A draw has 53 bits: so many of its first word, and the second one whole.
constexpr uint32_t kUpperBits = (1u << 21) - 1;

inline uint32_t twisted(uint32_t upper, uint32_t lower) {
    uint32_t mixed = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

FOR_PROCESSORS void next_block(uint32_t *state) {
    for (int64_t i = 0; i < kWords - kShift; ++i)
        state[i] = state[i + kShift] ^ twisted(state[i], state[i + 1]);
    for (int64_t i = kWords - kShift; i < kWords - 1; ++i)
        state[i] = state[i + kShift - kWords] ^ twisted(state[i], state[i + 1]);
    state[kWords - 1] = state[kShift - 1] ^ twisted(state[kWords - 1], state[0]);
}

FOR_PROCESSORS void temper(const uint32_t *state, int64_t count, uint32_t *words) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t word = state[i];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c5680u;
        word ^= (word << 15) & 0xefc60000u;
        words[i] = word ^ (word >> 18);
    }
}

// Whether the number of two words is below the limit.
FOR_PROCESSORS void compare(const uint32_t *words, int64_t count, uint32_t upper_limit,
                            uint32_t lower_limit, uint8_t *mask) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t upper = words[2 * i] & kUpperBits, lower = words[2 * i + 1];
        mask[i] = (upper < upper_limit) | ((upper == upper_limit) & (lower < lower_limit));
    }
}

void fill(uint8_t *mask, int64_t count, double probability, at::CPUGeneratorImpl *generator) {
    std::lock_guard<std::mutex> lock(generator->mutex_);
    at::mt19937 engine = generator->engine();
    at::mt19937_data_pod data = engine.data();
    // Below it: a number of 53 bits is exact in float64, and so is its product with a power of two.
    auto limit = static_cast<uint64_t>(std::ceil(std::ldexp(probability, 53)));
    auto upper = static_cast<uint32_t>(limit >> 32), lower = static_cast<uint32_t>(limit);
    uint32_t words[kWords + 1];
    int64_t unused = data.left_ - 1, kept = 0;
    while (count > 0) {
        if (unused == 0) {
            next_block(data.state_.data());
            data.next_ = 0;
            unused = kWords;
        }
        int64_t taken = std::min(unused, 2 * count - kept);
        temper(data.state_.data() + data.next_, taken, words + kept);
        data.next_ += taken;
        unused -= taken;
        int64_t pairs = (kept + taken) / 2;
        compare(words, pairs, upper, lower, mask);
        mask += pairs;
        count -= pairs;
        // A block may end between the two words of a draw.
        kept = (kept + taken) % 2;
        words[0] = words[2 * pairs];
    }
    data.left_ = static_cast<int>(unused) + 1;
    engine.set_data(data);
    generator->set_engine(engine);
}

PyObject *fill_mask(PyObject *, PyObject *args) {
    unsigned long long address;
    long long count;
    double probability;
    PyObject *object;
    if (!PyArg_ParseTuple(args, "KLdO", &address, &count, &probability, &object))
        return nullptr;
    if (!THPGenerator_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "expected a torch.Generator");
        return nullptr;
    }
    at::Generator generator = THPGenerator_Unwrap(object);
    if (generator.device().type() != at::kCPU || !(probability >= 0 && probability <= 1)) {
        PyErr_SetString(PyExc_ValueError, "expected a generator of the CPU, and p from 0 to 1");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS;
    fill(reinterpret_cast<uint8_t *>(address), count, probability,
         generator.get<at::CPUGeneratorImpl>());
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"fill_mask", fill_mask, METH_VARARGS,
     "fill_mask(address, count, p, generator)\n--\n\n"
     "Fill so many bytes with ones with probability p, and zeros."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tvmbridge.core._bernoulli",
    "The compiled half of tvmbridge.core.bernoulli.", -1, functions,
};

} // namespace

PyMODINIT_FUNC PyInit__bernoulli(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == nullptr)
        return nullptr;
    if (PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
