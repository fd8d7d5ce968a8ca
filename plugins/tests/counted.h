// What this program's own code takes of the host: memory and locks, counted. Linked into every test program,
// in the place of the C library's functions; what CUDA, cuDNN and cuBLASLt take themselves is not counted.
#pragma once

namespace mha_deploy::check {

struct Taken {
    long allocations = 0;
    long locks = 0;
};

// Of the calling thread, since it began.
Taken taken() noexcept;

// Whether anything is counted: a sanitizer brings functions of its own.
bool is_counting() noexcept;

// What `work` takes.
template <typename Work>
Taken taken_by(Work const& work) {
    Taken const before = taken();
    work();
    Taken const after = taken();
    return {after.allocations - before.allocations, after.locks - before.locks};
}

}  // namespace mha_deploy::check
