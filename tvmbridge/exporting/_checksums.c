/* The CRC-32 of zlib, linked into the code of an exported function.
 *
 * The runtime verifies hundreds of megabytes of weights at each start. It has the table of zlib,
 * which reads about one gigabyte per second. tvmbridge_crc32() multiplies polynomials of 64 bits
 * by the instruction of x86 for it, or uses the checksum instructions of ARM.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t table[256];

__attribute__((constructor)) static void fill_table(void) {
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
}

static uint32_t by_bytes(uint32_t crc, const uint8_t* data, size_t size) {
  for (; size; --size, ++data) crc = crc >> 8 ^ table[(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Powers of x modulo the polynomial, bits reversed, that move 128 bits over a distance. */
#define OVER_64_BYTES _mm_set_epi64x(0x01c6e41596, 0x0154442bd4)
#define OVER_16_BYTES _mm_set_epi64x(0x00ccaa009e, 0x01751997d0)

__attribute__((target("pclmul,sse2"))) static __m128i moved(__m128i part, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(part, by, 0x00), _mm_clmulepi64_si128(part, by, 0x11));
}

static __m128i at(const uint8_t* data) { return _mm_loadu_si128((const __m128i*)data); }

__attribute__((target("pclmul,sse2"))) static uint32_t folded(uint32_t crc, const uint8_t* data,
                                                              size_t size) {
  __m128i part[4];
  for (int i = 0; i < 4; ++i) part[i] = at(data + 16 * i);
  part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128((int)crc));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
    for (int i = 0; i < 4; ++i)
      part[i] = _mm_xor_si128(moved(part[i], OVER_64_BYTES), at(data + 16 * i));
  for (int i = 1; i < 4; ++i) part[i] = _mm_xor_si128(moved(part[i - 1], OVER_16_BYTES), part[i]);
  /* The bytes so far have the checksum of these sixteen. */
  uint8_t last[16];
  _mm_storeu_si128((__m128i*)last, part[3]);
  return by_bytes(by_bytes(0, last, sizeof last), data, size);
}

static uint32_t checksum(uint32_t crc, const uint8_t* data, size_t size) {
  if (size < 64 || !__builtin_cpu_supports("pclmul")) return by_bytes(crc, data, size);
  return folded(crc, data, size);
}
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>

#define HAS_CRC32 (1 << 7)

__attribute__((target("+crc"))) static uint32_t by_words(uint32_t crc, const uint8_t* data,
                                                         size_t size) {
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    crc = __crc32d(crc, word);
  }
  return by_bytes(crc, data, size);
}

static uint32_t checksum(uint32_t crc, const uint8_t* data, size_t size) {
  return getauxval(AT_HWCAP) & HAS_CRC32 ? by_words(crc, data, size) : by_bytes(crc, data, size);
}
#else
static uint32_t checksum(uint32_t crc, const uint8_t* data, size_t size) {
  return by_bytes(crc, data, size);
}
#endif

/* Return the CRC-32 of `size` bytes. */
uint32_t tvmbridge_crc32(const void* data, size_t size) {
  return ~checksum(0xFFFFFFFFu, (const uint8_t*)data, size);
}
