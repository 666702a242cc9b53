// Number formats: the same bits on both devices (but for the sign and payload of a NaN, which CUDA does not keep).
#pragma once
#include "device.cuh"

DEV f32 bf16_to_f32(u16 bits) { return f32_from_bits((u32)bits << 16); }

#ifdef __CUDACC__
// clang-format off: one instruction, one line
// Nearest, ties to even.
DEV u16 f32_to_bf16(f32 x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV u32 f32x2_to_bf16(f32 low, f32 high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV u16 f32_to_f16(f32 x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV u32 f32x2_to_f16(f32 low, f32 high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV f32 f16_to_f32(u16 bits) { f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits)); return r; }
// Nearest, ties to even; beyond 448, and infinite: +-448; NaN: 0x7f.
DEV u8 f32_to_e4m3(f32 x) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(x)); return (u8)r; }
// clang-format on
DEV f32 e4m3_to_f32(u8 bits) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)bits));
  return f16_to_f32((u16)r);
}
#else
// The upper bits of `x` after dropping `drop` low ones: nearest, ties to even.
DEV u32 round_off(u32 x, u32 drop) { return (x + (1u << (drop - 1)) - 1 + ((x >> drop) & 1)) >> drop; }

DEV u16 f32_to_bf16(f32 x) {
  u32 bits = f32_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (u16)((bits >> 16 & 0x8000) | 0x7fc0);
  return (u16)round_off(bits, 16);
}
DEV u32 f32x2_to_bf16(f32 low, f32 high) { return f32_to_bf16(low) | (u32)f32_to_bf16(high) << 16; }

// A float whose magnitude is below the format's smallest normal number becomes a multiple of its smallest subnormal:
// adding 2^23 such multiples lets the addition round, and leaves the multiple in the low bits.
DEV u32 subnormal(u32 magnitude, u32 biased_exponent) {
  f32 shift = f32_from_bits(biased_exponent << 23);
  return f32_bits(f32_from_bits(magnitude) + shift) - f32_bits(shift);
}

DEV u16 f32_to_f16(f32 x) {
  u32 bits = f32_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (u16)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
  if (magnitude >= 0x477ff000) return (u16)(sign | 0x7c00);                          // 65520 and more round to infinity
  if (magnitude < 0x38800000) return (u16)(sign | subnormal(magnitude, 127 - 1));    // below 2^-14: multiples of 2^-24
  return (u16)(sign | (round_off(magnitude, 13) - (112 << 10)));
}
DEV u32 f32x2_to_f16(f32 low, f32 high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }
DEV f32 f16_to_f32(u16 bits) {
  u32 sign = (u32)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return f32_from_bits(sign | 0x7f800000 | magnitude << 13 | (magnitude > 0x7c00 ? 0x400000 : 0));
  if (magnitude >= 0x400) return f32_from_bits(sign | ((magnitude << 13) + (112 << 23)));
  return f32_from_bits(sign | f32_bits((f32)magnitude * 0x1p-24f));
}

DEV u8 f32_to_e4m3(f32 x) {
  u32 bits = f32_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return (u8)(sign | 0x7e);                              // 448 and more
  if (magnitude < 0x3c800000) return (u8)(sign | subnormal(magnitude, 127 + 23 - 9));   // below 2^-6: multiples of 2^-9
  return (u8)(sign | (round_off(magnitude, 20) - (120 << 3)));
}
DEV f32 e4m3_to_f32(u8 bits) {
  u32 sign = (u32)(bits & 0x80) << 24, magnitude = bits & 0x7f;
  if (magnitude == 0x7f) return f32_from_bits(sign | 0x7fc00000);
  if (magnitude >= 8) return f32_from_bits(sign | ((magnitude << 20) + (120 << 23)));
  return f32_from_bits(sign | f32_bits((f32)magnitude * 0x1p-9f));
}
#endif

// Elements in 16 bytes.
template <i32 DTYPE>
DEV constexpr i32 vector_width() { return DTYPE == DTYPE_F32 ? 4 : 8; }

// 16 bytes of DTYPE to vector_width() floats, and back.
template <i32 DTYPE>
DEV void unpack(Vec16 v, f32* out) {
  u32 word[4] = {v.x, v.y, v.z, v.w};
  for (i32 i = 0; i < 4; i++) {
    if constexpr (DTYPE == DTYPE_F32) {
      out[i] = f32_from_bits(word[i]);
    } else if constexpr (DTYPE == DTYPE_BF16) {
      out[2 * i] = f32_from_bits(word[i] << 16);
      out[2 * i + 1] = f32_from_bits(word[i] & 0xffff0000);
    } else {
      out[2 * i] = f16_to_f32((u16)word[i]);
      out[2 * i + 1] = f16_to_f32((u16)(word[i] >> 16));
    }
  }
}
template <i32 DTYPE>
DEV Vec16 pack(const f32* in) {
  u32 word[4];
  for (i32 i = 0; i < 4; i++) {
    if constexpr (DTYPE == DTYPE_F32) word[i] = f32_bits(in[i]);
    else if constexpr (DTYPE == DTYPE_BF16) word[i] = f32x2_to_bf16(in[2 * i], in[2 * i + 1]);
    else word[i] = f32x2_to_f16(in[2 * i], in[2 * i + 1]);
  }
  return Vec16{word[0], word[1], word[2], word[3]};
}
