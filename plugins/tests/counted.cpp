#include "counted.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MHA_DEPLOY_COUNTS 0
#else
#define MHA_DEPLOY_COUNTS 1
#endif

namespace mha_deploy::check {
namespace {
thread_local Taken counted;
}

Taken taken() noexcept {
    return counted;
}

bool is_counting() noexcept {
    return MHA_DEPLOY_COUNTS != 0;
}

}  // namespace mha_deploy::check

#if MHA_DEPLOY_COUNTS
extern "C" {

// Where this program's code begins and ends; the C++ library is linked into it.
extern char const __executable_start;
extern char const etext;

// glibc's own names of what is replaced here.
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);

static bool is_ours(void const* caller) noexcept {
    auto const at = reinterpret_cast<std::uintptr_t>(caller);
    return at >= reinterpret_cast<std::uintptr_t>(&__executable_start)
           && at < reinterpret_cast<std::uintptr_t>(&etext);
}

static void count(long mha_deploy::check::Taken::*what, void const* caller) noexcept {
    mha_deploy::check::counted.*what += is_ours(caller) ? 1 : 0;
}

void* malloc(std::size_t bytes) {
    count(&mha_deploy::check::Taken::allocations, __builtin_return_address(0));
    return __libc_malloc(bytes);
}

void* calloc(std::size_t items, std::size_t bytes) {
    count(&mha_deploy::check::Taken::allocations, __builtin_return_address(0));
    return __libc_calloc(items, bytes);
}

void* realloc(void* memory, std::size_t bytes) {
    count(&mha_deploy::check::Taken::allocations, __builtin_return_address(0));
    return __libc_realloc(memory, bytes);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
    count(&mha_deploy::check::Taken::locks, __builtin_return_address(0));
    static auto* const next =
        reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
    return next(mutex);
}

}  // extern "C"
#endif
