// Small things that the GPU tests share: device memory, streams, graphs, and their main function.
#pragma once

#include "../src/driver.h"
#include "numbers.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace mha_deploy::check {

// What only tests want of the driver. The names in cuda.h are macros for the versioned ones, hence the two
// steps.
#define MHA_DEPLOY_TEST_FUNCTIONS(X) \
    X(device_get, cuDeviceGet) \
    X(device_name, cuDeviceGetName) \
    X(retain_context, cuDevicePrimaryCtxRetain) \
    X(set_context, cuCtxSetCurrent) \
    X(destroy_context, cuCtxDestroy) \
    X(describe_address, cuPointerGetAttributes) \
    X(set, cuMemsetD8) \
    X(to_host, cuMemcpyDtoH) \
    X(wait_event, cuEventSynchronize)
#define MHA_DEPLOY_NAME_OF(function) #function
#define MHA_DEPLOY_MEMBER(member, function) decltype(&function) member = nullptr;
#define MHA_DEPLOY_LOAD(member, function) \
    member = reinterpret_cast<decltype(member)>(dlsym(library, MHA_DEPLOY_NAME_OF(function)));

struct Gpu : Driver {
    MHA_DEPLOY_TEST_FUNCTIONS(MHA_DEPLOY_MEMBER)
    CUresult (*create_context)(CUcontext*, unsigned, CUdevice) = nullptr;  // the form that every driver has
    CUcontext context = nullptr;

    explicit Gpu(Driver const& driver) : Driver(driver) {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        MHA_DEPLOY_TEST_FUNCTIONS(MHA_DEPLOY_LOAD)
        MHA_DEPLOY_LOAD(create_context, cuCtxCreate_v2)
    }
};

#undef MHA_DEPLOY_LOAD
#undef MHA_DEPLOY_MEMBER
#undef MHA_DEPLOY_NAME_OF
#undef MHA_DEPLOY_TEST_FUNCTIONS

[[noreturn]] inline void stop(std::string const& reason) {
    std::fprintf(stderr, "stopped: %s\n", reason.c_str());
    std::exit(3);
}

inline void must(CUresult result, char const* tried) {
    if (result != CUDA_SUCCESS) {
        stop(status_of(result, tried).reason());
    }
}

// The first GPU, its primary context made current for the calling thread; the test stops where there is none.
inline Gpu const& gpu() {
    static Gpu const shared = [] {
        Driver const* driver = nullptr;
        if (Status const status = load_driver(driver); !status.ok()) {
            stop(status.reason());
        }
        Gpu made(*driver);
        CUdevice device = 0;
        char name[128] = "";
        must(made.device_get(&device, 0), "find a device");
        must(made.device_name(name, sizeof(name), device), "name the device");
        must(made.retain_context(&made.context, device), "make a context");
        std::printf("device %s\n", name);
        return made;
    }();
    must(shared.set_context(shared.context), "use the context");
    return shared;
}

// Device memory with bytes before and behind it that nobody may touch: `intact` is whether nobody did. What
// was not written yet is NaN, in 16 and in 32 bits, so that nobody reads it unnoticed; for initcheck, which
// finds such reads by itself, MHA_DEPLOY_TEST_UNFILLED leaves it as it is.
class Buffer {
public:
    static constexpr std::size_t kGuardBytes = 256;

    explicit Buffer(std::size_t bytes) : bytes_(bytes) {
        must(gpu().allocate(&address_, bytes + 2 * kGuardBytes), "take device memory");
        address_ += kGuardBytes;
        for (CUdeviceptr const guard : {address_ - kGuardBytes, address_ + bytes}) {
            must(gpu().set(guard, 0xa5, kGuardBytes), "fill device memory");
        }
        static bool const unfilled = std::getenv("MHA_DEPLOY_TEST_UNFILLED") != nullptr;
        if (!unfilled && bytes > 0) {
            must(gpu().set(address_, 0xff, bytes), "fill device memory");
        }
        settle();
    }
    template <typename Value>
    explicit Buffer(std::vector<Value> const& values) : Buffer(values.size() * sizeof(Value)) {
        upload(values);
    }
    Buffer(Buffer&& other) noexcept : address_(other.address_), bytes_(other.bytes_) { other.address_ = 0; }
    Buffer(Buffer const&) = delete;
    Buffer& operator=(Buffer const&) = delete;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() {
        if (address_ != 0) {
            gpu().free(address_ - kGuardBytes);
        }
    }

    template <typename Value>
    void upload(std::vector<Value> const& values) {
        if (values.size() * sizeof(Value) > bytes_) {
            stop("a test uploads more than its buffer holds");
        }
        if (!values.empty()) {
            must(gpu().copy_from_host(address_, values.data(), values.size() * sizeof(Value)), "upload");
            settle();
        }
    }
    void fill(unsigned char byte) const {
        must(gpu().set(address_, byte, bytes_), "fill device memory");
        settle();
    }
    template <typename Value>
    std::vector<Value> download() const {
        std::vector<Value> values(bytes_ / sizeof(Value));
        if (!values.empty()) {
            must(gpu().to_host(values.data(), address_, values.size() * sizeof(Value)), "download");
        }
        return values;
    }
    bool intact() const {
        std::vector<unsigned char> guards(2 * kGuardBytes);
        must(gpu().to_host(guards.data(), address_ - kGuardBytes, kGuardBytes), "download");
        must(gpu().to_host(guards.data() + kGuardBytes, address_ + bytes_, kGuardBytes), "download");
        return std::all_of(guards.begin(), guards.end(), [](unsigned char byte) { return byte == 0xa5; });
    }
    void* get() const { return reinterpret_cast<void*>(address_); }
    std::size_t bytes() const { return bytes_; }

private:
    // Copies and fills may still be under way when CUDA returns, and the streams of the tests do not wait for
    // them.
    static void settle() { must(gpu().synchronize(nullptr), "wait for device memory"); }

    CUdeviceptr address_ = 0;
    std::size_t bytes_ = 0;
};

class Stream {
public:
    Stream() { must(gpu().create_stream(&stream_, CU_STREAM_NON_BLOCKING), "make a stream"); }
    Stream(Stream const&) = delete;
    Stream& operator=(Stream const&) = delete;
    ~Stream() { gpu().destroy_stream(stream_); }
    CUstream get() const { return stream_; }
    void wait() const { must(gpu().synchronize(stream_), "wait for the stream"); }

private:
    CUstream stream_ = nullptr;
};

// A captured graph, ready to launch.
class Graph {
public:
    // `work` launches into the stream; what it returns is kept in `status`.
    template <typename Work>
    Graph(Stream const& stream, Work const& work) : stream_(stream) {
        must(gpu().begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "begin a capture");
        status = work();
        must(gpu().end_capture(stream.get(), &graph_), "end a capture");
        must(gpu().instantiate(&executable_, graph_, 0), "make a graph");
    }
    Graph(Graph const&) = delete;
    Graph& operator=(Graph const&) = delete;
    ~Graph() {
        gpu().destroy_executable(executable_);
        gpu().destroy_graph(graph_);
    }
    void launch() const { must(gpu().launch_graph(executable_, stream_.get()), "launch a graph"); }

    // Microseconds of one launch: the median of several rounds.
    double microseconds(int rounds = 7, int launches = 50) const {
        CUevent begin = nullptr;
        CUevent end = nullptr;
        must(gpu().create_event(&begin, CU_EVENT_DEFAULT), "make an event");
        must(gpu().create_event(&end, CU_EVENT_DEFAULT), "make an event");
        std::vector<float> times;
        for (int round = 0; round <= rounds; ++round) {
            must(gpu().record_event(begin, stream_.get()), "record an event");
            for (int i = 0; i < launches; ++i) {
                launch();
            }
            must(gpu().record_event(end, stream_.get()), "record an event");
            must(gpu().wait_event(end), "wait for an event");
            float milliseconds = 0.0F;
            must(gpu().elapsed(&milliseconds, begin, end), "read the time");
            if (round > 0) {  // the first one warms up
                times.push_back(milliseconds);
            }
        }
        gpu().destroy_event(begin);
        gpu().destroy_event(end);
        std::sort(times.begin(), times.end());
        return 1000.0 * times[times.size() / 2] / launches;
    }

    Status status;

private:
    Stream const& stream_;
    CUgraph graph_ = nullptr;
    CUgraphExec executable_ = nullptr;
};

// What a check found, told to GoogleTest, and printed with its figures where it passed, too.
class Tally {
public:
    void note(bool passed, std::string const& name, std::string const& figures = "") {
        std::printf("%s %s %s\n", passed ? "ok" : "FAILED", name.c_str(), figures.c_str());
        std::fflush(stdout);
        EXPECT_TRUE(passed) << name << " " << figures;
    }
    // Not a failure: the library said before any work was done that it has no kernel, and why.
    void refused(std::string const& name, std::string const& reason) {
        ::testing::Test::RecordProperty("refused", reason);
        [&] { GTEST_SKIP() << "refused " << name << " " << reason; }();
    }
};

// What a program for a GPU was asked for, beside GoogleTest's own options.
struct Options {
    bool small = false;  // few and small sizes, for compute-sanitizer
    std::string only;    // of what is timed: names with this text in them
};
inline Options options;

// The main function of such a program: it ends with 3 where there is no GPU. `--time` runs what is disabled
// otherwise, the suite `Times`.
inline int run_gpu_tests(int count, char** arguments) {
    ::testing::InitGoogleTest(&count, arguments);
    for (int i = 1; i < count; ++i) {
        std::string const argument = arguments[i];
        options.small = options.small || argument == "--small";
        options.only = argument == "--only" && i + 1 < count ? arguments[i + 1] : options.only;
        if (argument == "--time") {
            GTEST_FLAG_SET(filter, "Times.*");
            GTEST_FLAG_SET(also_run_disabled_tests, true);
        }
    }
    if (!GTEST_FLAG_GET(list_tests)) {
        gpu();
    }
    return RUN_ALL_TESTS();
}

}  // namespace mha_deploy::check
