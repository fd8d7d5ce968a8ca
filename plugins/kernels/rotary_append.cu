// What stands between the projections and attention, in one launch: queries and keys are rotated, new keys
// and values go into their caches, and the number of keys of each batch element is noted.
#include "../src/row_kernels.h"
#include "numbers.cuh"

namespace {

using mha_deploy::HeadCopy;
using mha_deploy::RotaryAppendCall;
using mha_deploy::Rotary;
using mha_deploy::from_float;
using mha_deploy::from_fp8;
using mha_deploy::to_fp8;
using mha_deploy::to_float;

template <typename T>
struct Eight {
    T of[8];
};

template <typename T>
__device__ Eight<T> load(uint4 const* address) {
    uint4 const bytes = *address;
    return *reinterpret_cast<Eight<T> const*>(&bytes);
}

// Eight numbers at a place of the target: as they are, in FP8, or rounded to its grid.
template <typename T>
__device__ void put(HeadCopy const& copy, long long piece, Eight<T> eight) {
    if (copy.fp8_scale != 0.0F) {
        float values[8];
        for (int i = 0; i < 8; ++i) {
            values[i] = to_float(eight.of[i]);
        }
        uint2 const narrow = to_fp8(values, 1.0F / copy.fp8_scale);
        if (copy.narrow != 0) {
            reinterpret_cast<uint2*>(copy.target)[piece] = narrow;
            return;
        }
        from_fp8(narrow, values);
        for (int i = 0; i < 8; ++i) {
            from_float(values[i] * copy.fp8_scale, eight.of[i]);
        }
    }
    copy.target[piece] = *reinterpret_cast<uint4 const*>(&eight);
}

// The row of the tables that belongs to a token; one outside of them is taken from their end.
__device__ long long table_row(RotaryAppendCall const& call, int batch, int row) {
    Rotary const& rotary = call.rotary;
    long long const token = static_cast<long long>(batch) * call.rows + row;
    long long place = row;
    if (rotary.positions == Rotary::kFromStarts) {
        place = static_cast<long long>(call.starts[batch]) + row;
    } else if (rotary.positions == Rotary::kPerToken) {
        place = token;
    } else if (rotary.positions == Rotary::kGiven) {
        place = rotary.given[token];
    }
    return place < 0 ? 0 : place >= rotary.table_rows ? rotary.table_rows - 1 : place;
}

// One thread: two pieces of 16 bytes that hold eight pairs, or one that holds four, or one that is copied.
template <typename T>
__device__ void move(RotaryAppendCall const& call, HeadCopy const& copy, int batch, int row, long long target,
    int unit_of_all) {
    Rotary const& rotary = call.rotary;
    int const head = unit_of_all / copy.units;
    int const unit = unit_of_all % copy.units;
    uint4 const* const from = copy.source + batch * copy.batch_stride + head * copy.head_stride
                              + row * copy.row_stride;
    long long const to = batch * copy.target_batch_stride + head * copy.target_head_stride
                         + target * copy.target_row_stride;
    bool const masked = call.mask.kept != nullptr && copy.is_key != 0
                        && call.mask.kept[static_cast<long long>(batch) * call.mask.keys + row] == 0;
    if (int const added = unit - (copy.units - copy.added); added >= 0) {
        float const far = copy.is_key == 0 ? mha_deploy::kFar : masked ? -mha_deploy::kFar : 0.0F;
        Eight<T> eight;
        for (int i = 0; i < 8; ++i) {
            from_float(far, eight.of[i]);
        }
        put(copy, to + copy.pieces + added, eight);
        return;
    }
    int const rotating = copy.rotates ? (rotary.interleaved ? rotary.pieces : rotary.pieces / 2) : 0;
    int const half = rotary.pieces / 2;
    // Behind the last token, too: kernels read whole tiles, and zero times NaN is NaN.
    if (row >= call.rows || masked) {
        Eight<T> const zero{};
        put(copy, to + (unit >= rotating ? unit - rotating + (copy.rotates ? rotary.pieces : 0) : unit), zero);
        if (unit < rotating && !rotary.interleaved) {
            put(copy, to + unit + half, zero);
        }
        return;
    }
    if (unit >= rotating) {
        int const piece = unit - rotating + (copy.rotates ? rotary.pieces : 0);
        put(copy, to + piece, load<T>(from + piece));
        return;
    }
    long long const pairs = table_row(call, batch, row) * rotary.pieces * 4;  // R/2 numbers in a row
    T const* const cos = static_cast<T const*>(rotary.cos) + pairs;
    T const* const sin = static_cast<T const*>(rotary.sin) + pairs;
    if (rotary.interleaved) {
        Eight<T> x = load<T>(from + unit);
        for (int i = 0; i < 4; ++i) {
            float const c = to_float(cos[unit * 4 + i]);
            float const s = to_float(sin[unit * 4 + i]);
            float const a = to_float(x.of[2 * i]);
            float const b = to_float(x.of[2 * i + 1]);
            from_float(a * c - b * s, x.of[2 * i]);
            from_float(a * s + b * c, x.of[2 * i + 1]);
        }
        put(copy, to + unit, x);
        return;
    }
    Eight<T> one = load<T>(from + unit);
    Eight<T> other = load<T>(from + unit + half);
    Eight<T> const c = load<T>(reinterpret_cast<uint4 const*>(cos) + unit);
    Eight<T> const s = load<T>(reinterpret_cast<uint4 const*>(sin) + unit);
    for (int i = 0; i < 8; ++i) {
        float const a = to_float(one.of[i]);
        float const b = to_float(other.of[i]);
        from_float(a * to_float(c.of[i]) - b * to_float(s.of[i]), one.of[i]);
        from_float(a * to_float(s.of[i]) + b * to_float(c.of[i]), other.of[i]);
    }
    put(copy, to + unit, one);
    put(copy, to + unit + half, other);
}

// The first key of a batch element that a mask leaves, by a whole block.
__device__ void find_first_key(mha_deploy::KeyMask const& mask, int batch) {
    __shared__ int first;
    if (threadIdx.x == 0) {
        first = mask.keys;
    }
    __syncthreads();
    for (int key = threadIdx.x; key < mask.keys; key += blockDim.x) {
        if (mask.kept[static_cast<long long>(batch) * mask.keys + key] != 0) {
            atomicMin(&first, key);
            break;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mask.first_keys[batch] = first;
    }
}

// A grid of (filled rows, units of all heads, batch).
template <typename T>
__device__ void rotate_and_append(RotaryAppendCall const& call) {
    int const row = blockIdx.x;
    int const batch = blockIdx.z;
    int unit = blockIdx.y * blockDim.x + threadIdx.x;
    long long target = row;
    bool fits = true;
    if (call.mask.first_keys != nullptr && row == 0 && blockIdx.y == 0) {
        find_first_key(call.mask, batch);
    }
    if (call.key_counts != nullptr) {  // with a cache
        int const start = call.starts[batch];
        if (row == 0 && unit == 0) {
            long long const keys = static_cast<long long>(start) + call.rows;
            call.key_counts[batch] =
                static_cast<int>(keys < 0 ? 0 : keys > call.cache_rows ? call.cache_rows : keys);
        }
        target = static_cast<long long>(start) + row;
        fits = start >= 0 && target < call.cache_rows;  // else it would lie outside of the cache
    }
    int const query_units = call.query.heads * call.query.units;
    int const key_units = call.key.heads * call.key.units;
    int const value_units = call.value.heads * call.value.units;
    if (unit < query_units) {
        if (row < call.rows) {
            move<T>(call, call.query, batch, row, row, unit);
        }
    } else if ((unit -= query_units) < key_units) {
        if (fits) {
            move<T>(call, call.key, batch, row, target, unit);
        }
    } else if ((unit -= key_units) < value_units && fits) {
        move<T>(call, call.value, batch, row, target, unit);
    }
}

}  // namespace

extern "C" __global__ void mha_deploy_rotary_append_fp16(RotaryAppendCall call) {
    rotate_and_append<__half>(call);
}

extern "C" __global__ void mha_deploy_rotary_append_bf16(RotaryAppendCall call) {
    rotate_and_append<__nv_bfloat16>(call);
}
