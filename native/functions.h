/* Exponential functions of vectors, each lane the same operations whatever its neighbours are. */
#ifndef FINBACK_FUNCTIONS_H
#define FINBACK_FUNCTIONS_H

#include "simd.h"

/* e^x, within 2 units in the last place; 0 far below, very large far above; no number stays none.
 * Source: Cephes expf (Moshier): x = n ln 2 + r, a polynomial of degree 6 in r. */
INLINE vf vf_exp(vf x) {
  vf low = vf_set(-87.33f);
  vf in = vf_min(vf_max(x, low), vf_set(88.37f));
  vf n = vf_round(in * vf_set(1.44269504088896341f));
  vf r = vf_fma(n, vf_set(-0.693359375f), in);
  r = vf_fma(n, vf_set(2.12194440e-4f), r);
  vf p = vf_set(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set(5.0000001201e-1f));
  p = vf_fma(p, r * r, r) + vf_set(1);
  return vf_less(x, vf_set(__builtin_inff()), vf_less(x, low, vf_zero(), p * vf_exp2(n)), x);
}

/* 1 / (1 + e^-x) */
INLINE vf vf_sigmoid(vf x) { return vf_set(1) / (vf_set(1) + vf_exp(vf_zero() - x)); }

/* tanh x: a polynomial near zero, where 1 - 2/(e^2x + 1) would lose its digits.
 * Source: Cephes tanhf. */
INLINE vf vf_tanh(vf x) {
  vf z = x * x;
  vf p = vf_set(-5.70498872745e-3f);
  p = vf_fma(p, z, vf_set(2.06390887954e-2f));
  p = vf_fma(p, z, vf_set(-5.37397155531e-2f));
  p = vf_fma(p, z, vf_set(1.33314422036e-1f));
  p = vf_fma(p, z, vf_set(-3.33332819422e-1f));
  vf near = vf_fma(p * z, x, x);
  vf size = vf_abs(x);
  vf far = vf_set(1) - vf_set(2) / (vf_exp(size + size) + vf_set(1));
  far = vf_less(x, vf_zero(), vf_zero() - far, far);
  return vf_less(size, vf_set(0.625f), near, far);
}

/* Run `body` for i from 0 to count in steps of VL, with `width` lanes of it meant (the last may be
 * fewer), through copies padded with zeros: loads and stores of part of a vector. */
INLINE vf vf_load_part(const float *p, int64_t width) {
  if (width >= VL) return vf_load(p);
  float padded[VL] = {0};
  memcpy(padded, p, (size_t)width * sizeof(float));
  return vf_load(padded);
}
INLINE void vf_store_part(float *p, vf a, int64_t width) {
  if (width >= VL) {
    vf_store(p, a);
    return;
  }
  float padded[VL];
  vf_store(padded, a);
  memcpy(p, padded, (size_t)width * sizeof(float));
}

#endif
