/* What the kernels need of an instruction set, one section for each. Chosen by the compiler's flags,
 * so that a source compiled four times becomes four sets of kernels.
 *
 * VL            floats in a vector
 * TILE_T        rows of x in the largest register tile beside 4 rows of weights
 * vf            vector of VL floats, with + - * as operators
 * vf_fma(a,b,c) a·b + c, rounded once where the machine can, else twice: never left to the compiler
 * vf_sum(a)     the lanes added in a fixed order
 * vf_round(a)   to the nearest whole number, ties to even
 * vf_exp2(a)    2^a for whole a from -126 to 127
 * vf_less(a, b, x, y)  lane by lane: x where a < b, else y
 * widen_*       VL values of a published format, from memory of any alignment
 * widen_mxfp4   32 codes from 16 bytes: first the even columns, then the odd ones
 * widen_int4    the same for whole numbers stored as value + 8
 *
 * For whole numbers a vector holds GROUPS groups of 32 columns, one in each 128 bits:
 * vi            VL sums of 32 bits
 * codes_16      16 · GROUPS bytes of codes -> 4 vectors of int16: weight · 512; per group the even
 *               columns 0 to 14, 16 to 30, then the odd ones
 * codes_8       the same -> 2 vectors of bytes: weight · 2 + OFFSET_8; even columns, then odd ones
 * vi_dot16, vi_dot8  add the products of neighbours: (sums, weights, x)
 * scales_of     GROUPS scale bytes -> 2^(byte - 127), each in four lanes */
#ifndef FINBACK_SIMD_H
#define FINBACK_SIMD_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* E2M1 by code; the upper eight are the negative ones. */
static const float E2M1[16] __attribute__((aligned(64))) = {
    0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

/* Twice the value of each code. */
static const int8_t E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* ================================================================================ AVX-512 ==== */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define ISA(name) name##_avx512
#define VL 16
#define TILE_T 6
typedef __m512 vf;

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float vf_sum(vf a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, 8); }
INLINE vf vf_exp2(vf a) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
INLINE vf vf_less(vf a, vf b, vf x, vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
INLINE vf widen_bf16(const uint16_t *p) {
  __m256i v = _mm256_loadu_si256((const __m256i *)p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
INLINE vf widen_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void widen_mxfp4(const uint8_t *p, vf out[2]) {
  __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  vf table = _mm512_load_ps(E2M1);
  out[0] = _mm512_permutexvar_ps(v, table); /* looks at the low four bits only */
  out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table);
}
INLINE vf widen_int8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void widen_int4(const uint8_t *p, vf out[2]) {
  __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m512i mask = _mm512_set1_epi32(15), eight = _mm512_set1_epi32(8);
  out[0] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(v, mask), eight));
  out[1] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(v, 4), eight));
}
INLINE vf widen_fp8(const uint8_t *p) { /* as a half 256 times too small; no slow subnormals */
  __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
  __m256i size = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x7f)), 7);
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
  return _mm512_cvtph_ps(_mm256_or_si256(size, sign)) * _mm512_set1_ps(256);
}

#define GROUPS 4
#define OFFSET_8 12
typedef __m512i vi;
typedef __m512i vi16;
typedef __m512i vi8;
INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vf vf_from(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_dot16(vi sum, vi16 w, vi16 x) { return _mm512_dpwssd_epi32(sum, w, x); }
INLINE vi vi_dot8(vi sum, vi8 w, vi8 x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE void codes_bytes(const uint8_t *p, __m128i values, __m512i out[2]) {
  const __m512i table = _mm512_broadcast_i32x4(values), mask = _mm512_set1_epi8(15);
  __m512i v = _mm512_loadu_si512(p);
  out[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(v, mask));
  out[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), mask));
}
INLINE void codes_16(const uint8_t *p, vi16 out[4]) {
  __m512i bytes[2];
  codes_bytes(p, _mm_loadu_si128((const __m128i *)E2M1_DOUBLED), bytes);
  for (int odd = 0; odd < 2; odd++) { /* in the high byte: times 256 */
    out[2 * odd] = _mm512_unpacklo_epi8(_mm512_setzero_si512(), bytes[odd]);
    out[2 * odd + 1] = _mm512_unpackhi_epi8(_mm512_setzero_si512(), bytes[odd]);
  }
}
INLINE void codes_8(const uint8_t *p, vi8 out[2]) {
  __m128i values = _mm_loadu_si128((const __m128i *)E2M1_DOUBLED);
  codes_bytes(p, _mm_add_epi8(values, _mm_set1_epi8(OFFSET_8)), out);
}
INLINE vf scales_of(const uint8_t *p) {
  int32_t four;
  memcpy(&four, p, 4);
  __m128i bits = _mm_slli_epi32(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)), 23);
  bits = _mm_max_epi32(bits, _mm_set1_epi32(0x400000)); /* byte 0 is the subnormal 2^-127 */
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(bits)));
}

/* =================================================================================== AVX2 ==== */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define ISA(name) name##_avx2
#define VL 8
#define TILE_T 3
typedef __m256 vf;

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set(float a) { return _mm256_set1_ps(a); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float vf_sum(vf a) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, 8); }
INLINE vf vf_exp2(vf a) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
INLINE vf vf_less(vf a, vf b, vf x, vf y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE vf widen_bf16(const uint16_t *p) {
  __m128i v = _mm_loadu_si128((const __m128i *)p);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
INLINE vf widen_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE void widen_mxfp4(const uint8_t *p, vf out[4]) {
  /* Every E2M1 value is a bfloat16: two byte tables give its halves. */
  const __m128i high = _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41,
                                     -0x41, -0x41, -0x40, -0x40, -0x40, -0x40);
  const __m128i low =
      _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40);
  const __m128i mask = _mm_set1_epi8(15);
  __m128i v = _mm_loadu_si128((const __m128i *)p);
  for (int odd = 0; odd < 2; odd++) {
    __m128i code = _mm_and_si128(odd ? _mm_srli_epi16(v, 4) : v, mask);
    __m128i h = _mm_shuffle_epi8(high, code), l = _mm_shuffle_epi8(low, code);
    __m256i a = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(l, h));
    __m256i b = _mm256_cvtepu16_epi32(_mm_unpackhi_epi8(l, h));
    out[2 * odd] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    out[2 * odd + 1] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  }
}
INLINE vf widen_int8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE void widen_int4(const uint8_t *p, vf out[4]) {
  __m128i v = _mm_loadu_si128((const __m128i *)p);
  for (int odd = 0; odd < 2; odd++) {
    __m128i code = _mm_and_si128(odd ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15));
    code = _mm_sub_epi8(code, _mm_set1_epi8(8));
    out[2 * odd] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code));
    out[2 * odd + 1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(code, 8)));
  }
}
INLINE vf widen_fp8(const uint8_t *p) { /* as a half 256 times too small; no slow subnormals */
  __m128i v = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
  __m128i size = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x7f)), 7);
  __m128i sign = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x80)), 8);
  return _mm256_cvtph_ps(_mm_or_si128(size, sign)) * _mm256_set1_ps(256);
}

#define GROUPS 2
#define OFFSET_8 12
typedef __m256i vi;
typedef __m256i vi16;
typedef __m256i vi8;
INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void vi_store(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
INLINE vf vf_from(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi vi_dot16(vi sum, vi16 w, vi16 x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
INLINE vi vi_dot8(vi sum, vi8 w, vi8 x) {
  __m256i pairs = _mm256_maddubs_epi16(w, x); /* at most 2 · 24 · 127: does not saturate */
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE void codes_bytes(const uint8_t *p, __m128i values, __m256i out[2]) {
  const __m256i table = _mm256_broadcastsi128_si256(values), mask = _mm256_set1_epi8(15);
  __m256i v = _mm256_loadu_si256((const __m256i *)p);
  out[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(v, mask));
  out[1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), mask));
}
INLINE void codes_16(const uint8_t *p, vi16 out[4]) {
  __m256i bytes[2];
  codes_bytes(p, _mm_loadu_si128((const __m128i *)E2M1_DOUBLED), bytes);
  for (int odd = 0; odd < 2; odd++) { /* in the high byte: times 256 */
    out[2 * odd] = _mm256_unpacklo_epi8(_mm256_setzero_si256(), bytes[odd]);
    out[2 * odd + 1] = _mm256_unpackhi_epi8(_mm256_setzero_si256(), bytes[odd]);
  }
}
INLINE void codes_8(const uint8_t *p, vi8 out[2]) {
  __m128i values = _mm_loadu_si128((const __m128i *)E2M1_DOUBLED);
  codes_bytes(p, _mm_add_epi8(values, _mm_set1_epi8(OFFSET_8)), out);
}
INLINE vf scales_of(const uint8_t *p) {
  __m128i bytes = _mm_setr_epi32(p[0], p[0], p[0], p[0]);
  __m256i bits = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_set1_epi32(p[1]), 1);
  bits = _mm256_max_epi32(_mm256_slli_epi32(bits, 23), _mm256_set1_epi32(0x400000));
  return _mm256_castsi256_ps(bits);
}

/* =================================================================================== NEON ==== */
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ISA(name) name##_neon
#define VL 4
#define TILE_T 5
typedef float32x4_t vf;

INLINE vf vf_zero(void) { return vdupq_n_f32(0); }
INLINE vf vf_set(float a) { return vdupq_n_f32(a); }
INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE float vf_sum(vf a) {
  float32x2_t q = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(q, 0) + vget_lane_f32(q, 1);
}
INLINE vf vf_min(vf a, vf b) { return vminq_f32(a, b); }
INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE vf vf_abs(vf a) { return vabsq_f32(a); }
INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
INLINE vf vf_exp2(vf a) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(a), vdupq_n_s32(127)), 23));
}
INLINE vf vf_less(vf a, vf b, vf x, vf y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
INLINE vf widen_bf16(const uint16_t *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
INLINE vf widen_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void widen_mxfp4(const uint8_t *p, vf out[8]) {
  static const uint8_t high[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                   0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                  0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  uint8x16_t v = vld1q_u8(p), h = vld1q_u8(high), l = vld1q_u8(low);
  for (int odd = 0; odd < 2; odd++) {
    uint8x16_t code = odd ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15));
    uint8x16_t ch = vqtbl1q_u8(h, code), cl = vqtbl1q_u8(l, code);
    uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(cl, ch)), b = vreinterpretq_u16_u8(vzip2q_u8(cl, ch));
    out[4 * odd] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16));
    out[4 * odd + 1] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(a), 16));
    out[4 * odd + 2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16));
    out[4 * odd + 3] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(b), 16));
  }
}
INLINE vf widen_int8(const int8_t *p) {
  int32_t four;
  memcpy(&four, p, 4);
  int8x8_t v = vreinterpret_s8_s32(vdup_n_s32(four));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(v))));
}
INLINE void widen_int4(const uint8_t *p, vf out[8]) {
  uint8x16_t v = vld1q_u8(p);
  for (int odd = 0; odd < 2; odd++) {
    uint8x16_t code = odd ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15));
    int8_t values[16];
    vst1q_s8(values, vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(8)));
    for (int i = 0; i < 4; i++) out[4 * odd + i] = widen_int8(values + 4 * i);
  }
}
INLINE vf widen_fp8(const uint8_t *p) { /* as a half 256 times too small; no slow subnormals */
  uint32_t four;
  memcpy(&four, p, 4);
  uint16x4_t v = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
  uint16x4_t size = vshl_n_u16(vand_u16(v, vdup_n_u16(0x7f)), 7);
  uint16x4_t sign = vshl_n_u16(vand_u16(v, vdup_n_u16(0x80)), 8);
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(size, sign))), 256);
}

#define GROUPS 1
#define OFFSET_8 0
typedef int32x4_t vi;
typedef int16x8_t vi16;
typedef int8x16_t vi8;
INLINE vi vi_zero(void) { return vdupq_n_s32(0); }
INLINE vi vi_load(const void *p) { return vld1q_s32((const int32_t *)p); }
INLINE vi16 vi16_load(const void *p) { return vld1q_s16((const int16_t *)p); }
INLINE vi8 vi8_load(const void *p) { return vld1q_s8((const int8_t *)p); }
INLINE void vi16_store(void *p, vi16 a) { vst1q_s16((int16_t *)p, a); }
INLINE void vi8_store(void *p, vi8 a) { vst1q_s8((int8_t *)p, a); }
INLINE vf vf_from(vi a) { return vcvtq_f32_s32(a); }
INLINE vi vi_dot16(vi sum, vi16 w, vi16 x) {
  int32x4_t low = vmull_s16(vget_low_s16(w), vget_low_s16(x));
  int32x4_t high = vmull_s16(vget_high_s16(w), vget_high_s16(x));
  return vaddq_s32(sum, vpaddq_s32(low, high));
}
INLINE vi vi_dot8(vi sum, vi8 w, vi8 x) {
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
  int16x8_t high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
INLINE void codes_8(const uint8_t *p, vi8 out[2]) {
  int8x16_t table = vld1q_s8(E2M1_DOUBLED);
  uint8x16_t v = vld1q_u8(p);
  out[0] = vqtbl1q_s8(table, vandq_u8(v, vdupq_n_u8(15)));
  out[1] = vqtbl1q_s8(table, vshrq_n_u8(v, 4));
}
INLINE void codes_16(const uint8_t *p, vi16 out[4]) {
  vi8 bytes[2];
  codes_8(p, bytes);
  for (int odd = 0; odd < 2; odd++) {
    out[2 * odd] = vshll_n_s8(vget_low_s8(bytes[odd]), 8);
    out[2 * odd + 1] = vshll_n_s8(vget_high_s8(bytes[odd]), 8);
  }
}
INLINE vf scales_of(const uint8_t *p) {
  uint32_t bits = p[0] ? (uint32_t)p[0] << 23 : 0x400000u;
  return vreinterpretq_f32_u32(vdupq_n_u32(bits));
}

/* =================================================================================== base ==== */
#else
#define ISA(name) name##_base
#define VL 4
#define TILE_T 2
typedef float vf __attribute__((vector_size(16)));

INLINE vf vf_zero(void) { return (vf){0, 0, 0, 0}; }
INLINE vf vf_set(float a) { return (vf){a, a, a, a}; }
INLINE vf vf_load(const float *p) {
  vf a;
  memcpy(&a, p, sizeof a);
  return a;
}
INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; } /* compiled without contraction */
INLINE float vf_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
#define EACH(expression) ((vf){expression(0), expression(1), expression(2), expression(3)})
INLINE vf vf_less(vf a, vf b, vf x, vf y) {
#define LANE(i) (a[i] < b[i] ? x[i] : y[i])
  return EACH(LANE);
#undef LANE
}
INLINE vf vf_min(vf a, vf b) { return vf_less(a, b, a, b); }
INLINE vf vf_max(vf a, vf b) { return vf_less(b, a, a, b); }
INLINE vf vf_abs(vf a) {
#define LANE(i) __builtin_fabsf(a[i])
  return EACH(LANE);
#undef LANE
}
INLINE vf vf_round(vf a) {
#define LANE(i) __builtin_rintf(a[i])
  return EACH(LANE);
#undef LANE
}
INLINE float from_bits(uint32_t bits) {
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}
INLINE vf vf_exp2(vf a) {
#define LANE(i) from_bits((uint32_t)((int32_t)a[i] + 127) << 23)
  return EACH(LANE);
#undef LANE
}
INLINE vf widen_bf16(const uint16_t *p) {
  return (vf){from_bits((uint32_t)p[0] << 16), from_bits((uint32_t)p[1] << 16),
              from_bits((uint32_t)p[2] << 16), from_bits((uint32_t)p[3] << 16)};
}
INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  float size = rest >= 0x400 ? from_bits((rest << 13) + 0x38000000) : (float)rest * 0x1p-24f;
  return sign ? -size : size;
}
INLINE vf widen_f16(const uint16_t *p) {
  return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE void widen_mxfp4(const uint8_t *p, vf out[8]) {
  for (int i = 0; i < 4; i++) {
    const uint8_t *q = p + 4 * i;
    out[i] = (vf){E2M1[q[0] & 15], E2M1[q[1] & 15], E2M1[q[2] & 15], E2M1[q[3] & 15]};
    out[4 + i] = (vf){E2M1[q[0] >> 4], E2M1[q[1] >> 4], E2M1[q[2] >> 4], E2M1[q[3] >> 4]};
  }
}
INLINE vf widen_int8(const int8_t *p) {
  return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
INLINE void widen_int4(const uint8_t *p, vf out[8]) {
  for (int i = 0; i < 16; i++) {
    out[i / 4][i % 4] = (float)((p[i] & 15) - 8);
    out[4 + i / 4][i % 4] = (float)((p[i] >> 4) - 8);
  }
}
INLINE float fp8_to_float(uint8_t b) { /* as a half 256 times too small; no slow subnormals */
  return half_to_float((uint16_t)((b & 0x7f) << 7 | (b & 0x80) << 8)) * 256;
}
INLINE vf widen_fp8(const uint8_t *p) {
  return (vf){fp8_to_float(p[0]), fp8_to_float(p[1]), fp8_to_float(p[2]), fp8_to_float(p[3])};
}

#define GROUPS 1
#define OFFSET_8 0
typedef int32_t vi __attribute__((vector_size(16)));
typedef int16_t vi16 __attribute__((vector_size(16)));
typedef int8_t vi8 __attribute__((vector_size(16)));
#define LOAD_AS(type, p) \
  type a;                \
  memcpy(&a, p, sizeof a); \
  return a
INLINE vi vi_zero(void) { return (vi){0, 0, 0, 0}; }
INLINE vi vi_load(const void *p) { LOAD_AS(vi, p); }
INLINE vi16 vi16_load(const void *p) { LOAD_AS(vi16, p); }
INLINE vi8 vi8_load(const void *p) { LOAD_AS(vi8, p); }
INLINE void vi16_store(void *p, vi16 a) { memcpy(p, &a, sizeof a); }
INLINE void vi8_store(void *p, vi8 a) { memcpy(p, &a, sizeof a); }
INLINE vf vf_from(vi a) { return (vf){(float)a[0], (float)a[1], (float)a[2], (float)a[3]}; }
INLINE vi vi_dot16(vi sum, vi16 w, vi16 x) {
  for (int i = 0; i < 4; i++) sum[i] += w[2 * i] * x[2 * i] + w[2 * i + 1] * x[2 * i + 1];
  return sum;
}
INLINE vi vi_dot8(vi sum, vi8 w, vi8 x) {
  for (int i = 0; i < 16; i++) sum[i / 4] += w[i] * x[i];
  return sum;
}
INLINE void codes_16(const uint8_t *p, vi16 out[4]) {
  for (int i = 0; i < 16; i++) {
    out[i / 8][i % 8] = (int16_t)(E2M1_DOUBLED[p[i] & 15] * 256);
    out[2 + i / 8][i % 8] = (int16_t)(E2M1_DOUBLED[p[i] >> 4] * 256);
  }
}
INLINE void codes_8(const uint8_t *p, vi8 out[2]) {
  for (int i = 0; i < 16; i++) {
    out[0][i] = E2M1_DOUBLED[p[i] & 15];
    out[1][i] = E2M1_DOUBLED[p[i] >> 4];
  }
}
INLINE vf scales_of(const uint8_t *p) {
  return vf_set(from_bits(p[0] ? (uint32_t)p[0] << 23 : 0x400000u));
}
#endif

#if GROUPS > 1
#define vi16_load vi_load
#define vi8_load vi_load
#define vi16_store vi_store
#define vi8_store vi_store
#endif

/* E8M0: 2^(byte - 127), exact; byte 0 is the subnormal 2^-127. */
INLINE float scale_of(uint8_t byte) {
  uint32_t bits = byte ? (uint32_t)byte << 23 : 0x400000u;
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}

#endif
