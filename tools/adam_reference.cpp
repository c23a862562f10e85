// The update of tierzero.optim.hyper.AdamScalars, as a compiler vectorises it. Only measured against; the package has
// no compiled code. Built by tools/bench_adam.py.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float flush(float x) { return (as_bits(x) & 0x7F800000u) == 0 ? 0.0f : x; }

}  // namespace

extern "C" void adam(uint16_t* __restrict hi, int16_t* __restrict lo, float* __restrict m, float* __restrict v,
                     const uint16_t* __restrict grad, long n, float scale, float decay, float l2, float lerp,
                     float beta2, float one_minus_beta2, float inv_sqrt_bias2, float eps, float step_size) {
    (void)l2;
    for (long i = 0; i < n; ++i) {
        float w = as_float((static_cast<uint32_t>(hi[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo[i])));
        float g = as_float(static_cast<uint32_t>(grad[i]) << 16) * scale;
        w = w * decay;
        float mi = flush(m[i] + lerp * (g - m[i]));
        float vi = flush(v[i] * beta2 + (one_minus_beta2 * g) * g);
        w = w - (step_size * mi) / (std::sqrt(vi) * inv_sqrt_bias2 + eps);
        uint32_t bits = as_bits(w);
        uint32_t upper = (bits + 0x8000u) >> 16;
        hi[i] = static_cast<uint16_t>(upper);
        lo[i] = static_cast<int16_t>(bits - (upper << 16));
        m[i] = mi;
        v[i] = vi;
    }
}
