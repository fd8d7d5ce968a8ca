// 16-bit numbers on the host, random ones, and how far two results are apart.
#pragma once

#include "../src/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace mha_deploy::check {

// FP16 and BF16 as their bits. Rounding is to nearest even, as the GPU does it.
inline uint16_t bits_of_number(Type type, double number) {
    auto const value = static_cast<float>(number);
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof(word));
    if (std::isnan(value)) {
        return 0x7fff;  // a quiet NaN in both types
    }
    auto const sign = static_cast<uint32_t>(word >> 16U) & 0x8000U;
    if (type == Type::kBFloat16) {
        return static_cast<uint16_t>((word + 0x7fffU + ((word >> 16U) & 1U)) >> 16U);
    }
    double const size = std::fabs(number);
    if (size >= 65520.0) {
        return static_cast<uint16_t>(sign | 0x7c00U);
    }
    if (size < 6.103515625e-05) {  // subnormal: whole multiples of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0)));
    }
    word &= 0x7fffffffU;
    return static_cast<uint16_t>(sign | ((word + 0xfffU + ((word >> 13U) & 1U) - (112U << 23U)) >> 13U));
}

inline double number_of_bits(Type type, uint16_t bits) {
    if (type == Type::kBFloat16) {
        uint32_t const word = static_cast<uint32_t>(bits) << 16U;
        float value = 0.0F;
        std::memcpy(&value, &word, sizeof(value));
        return static_cast<double>(value);
    }
    int const exponent = (bits >> 10U) & 0x1f;
    double const fraction = static_cast<double>(bits & 0x3ffU);
    using Limits = std::numeric_limits<double>;
    double size = 0.0;
    if (exponent == 31) {
        size = fraction != 0.0 ? Limits::quiet_NaN() : Limits::infinity();
    } else {
        size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0 + fraction, exponent - 25);
    }
    return (bits & 0x8000U) != 0U ? -size : size;
}

// FP8, E4M3: no infinities, and one NaN of each sign.
inline double number_of_fp8(uint8_t bits) {
    int const exponent = (bits >> 3U) & 0xf;
    double const fraction = static_cast<double>(bits & 7U);
    double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8.0 + fraction, exponent - 10);
    if ((bits & 0x7fU) == 0x7fU) {
        size = std::numeric_limits<double>::quiet_NaN();
    }
    return (bits & 0x80U) != 0U ? -size : size;
}

// The nearest number of FP8; beyond its range the last one.
inline double rounded_to_fp8(double number) {
    double const size = std::fabs(number);
    double const step = std::ldexp(1.0, std::max(size > 0.0 ? std::ilogb(size) : -6, -6) - 3);
    return std::copysign(std::min(std::nearbyint(size / step) * step, 448.0), number);
}

// Bytes that are numbers up to 15 in FP8, the same for the same seed.
inline std::vector<uint8_t> random_fp8(std::size_t count, uint32_t seed) {
    std::mt19937 engine(seed);
    std::vector<uint8_t> bits(count);
    for (uint8_t& each : bits) {
        uint32_t const drawn = engine() >> 8U;
        each = static_cast<uint8_t>((drawn & 0x80U) | (drawn % 0x58U));
    }
    return bits;
}

inline std::vector<double> numbers_of(Type type, std::vector<uint16_t> const& bits) {
    std::vector<double> numbers(bits.size());
    for (std::size_t i = 0; i < bits.size(); ++i) {
        numbers[i] = number_of_bits(type, bits[i]);
    }
    return numbers;
}

// Normally distributed numbers, the same for the same seed.
inline std::vector<uint16_t> random_bits(
    Type type, std::size_t count, uint32_t seed, double deviation = 1.0) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal(0.0, deviation);
    constexpr std::size_t kPeriod = std::size_t{1} << 20U;  // large tensors, for timing, repeat themselves
    std::vector<uint16_t> bits(count);
    for (std::size_t i = 0; i < count; ++i) {
        bits[i] = i < kPeriod ? bits_of_number(type, normal(engine)) : bits[i - kPeriod];
    }
    return bits;
}

// A projection in FP8 on the host: factors, bias in FP16, one scale or one for each output, and what is right.
struct Fp8Projection {
    std::size_t inputs, outputs;
    bool has_bias;
    std::vector<uint8_t> x, weight;  // [rows, inputs] and [outputs, inputs]
    std::vector<uint16_t> bias;
    std::vector<float> scales;

    Fp8Projection(std::size_t rows, std::size_t width, std::size_t columns, bool with_bias, bool scale_each)
        : inputs(width), outputs(columns), has_bias(with_bias), x(random_fp8(rows * width, 1)),
          weight(random_fp8(columns * width, 2)), bias(random_bits(Type::kHalf, columns, 3)),
          scales(scale_each ? columns : 1) {
        for (std::size_t i = 0; i < scales.size(); ++i) {
            scales[i] = 1e-3F * static_cast<float>(1 + i % 7);
        }
    }

    double exact(std::size_t row, std::size_t column) const {
        double sum = 0.0;
        for (std::size_t k = 0; k < inputs; ++k) {
            sum += number_of_fp8(x[row * inputs + k]) * number_of_fp8(weight[column * inputs + k]);
        }
        sum *= static_cast<double>(scales[scales.size() == 1 ? 0 : column]);
        return sum + (has_bias ? number_of_bits(Type::kHalf, bias[column]) : 0.0);
    }
};

// ||got - want|| / ||want||; infinite where a number is not finite or the counts differ; absolute where want
// is zero.
inline double relative_error(std::vector<double> const& got, std::vector<double> const& want) {
    double difference = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < want.size() && got.size() == want.size(); ++i) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    if (got.size() != want.size() || !std::isfinite(difference)) {
        return std::numeric_limits<double>::infinity();
    }
    return size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

// What a correct kernel with sums in FP32 stays below.
inline double tolerance(Type type) { return type == Type::kHalf ? 2e-3 : 1.5e-2; }

inline std::string format(char const* pattern, double value) {
    char text[64];
    std::snprintf(text, sizeof(text), pattern, value);
    return text;
}

}  // namespace mha_deploy::check
