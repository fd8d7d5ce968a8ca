// What is left when work is let go: from another thread, beside a recording, behind its context.
#pragma once

#include "attention_device.h"

#include <memory>
#include <thread>

namespace mha_deploy::check {

struct Holder {
    Driver const* driver = nullptr;
    Context context;
    DeviceMemory memory;
};

inline std::unique_ptr<Holder> holding(std::size_t bytes) {
    auto holder = std::make_unique<Holder>();
    Status status = load_driver(holder->driver);
    status = status.ok() ? current_context(*holder->driver, holder->context) : status;
    status = status.ok() ? holder->memory.allocate(*holder->driver, bytes) : status;
    return status.ok() ? std::move(holder) : nullptr;
}

// Asked of this address alone: how much is free depends on everyone else on the GPU.
inline bool is_taken(CUdeviceptr address) {
    CUmemorytype kind{};
    CUpointer_attribute asked = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    void* answer = &kind;
    must(gpu().describe_address(1, &asked, &answer, address), "ask what an address is");
    return kind == CU_MEMORYTYPE_DEVICE;
}

inline void check_freed_elsewhere(Tally& tally) {
    std::unique_ptr<Holder> holder = holding(std::size_t{64} << 20U);
    CUdeviceptr const address = holder->memory.address();
    bool const taken = is_taken(address);
    CUcontext left = nullptr;
    std::thread([&holder, &left] {  // a thread that never had a context, and must not get one
        Driver const& driver = *holder->driver;
        release_in_context(holder);
        driver.current_context(&left);
    }).join();
    bool const freed = taken && !is_taken(address);
    tally.note(holder == nullptr && freed && left == nullptr, "freed by a thread without a context");
}

inline void check_gone_context(Tally& tally) {
    CUcontext other = nullptr;
    CUdevice device = 0;
    must(gpu().device_get(&device, 0), "find a device");
    must(gpu().create_context(&other, 0, device), "make another context");
    std::unique_ptr<Holder> holder = holding(4096);
    bool const made = holder != nullptr;
    must(gpu().destroy_context(other), "destroy a context");
    must(gpu().set_context(gpu().context), "use the context");
    release_in_context(holder);
    Buffer const still_works(std::vector<int>{1, 2, 3});
    bool const works = still_works.download<int>()[2] == 3;
    tally.note(made && holder == nullptr && works, "left behind by its context");
}

// Whoever records in CUDA's default mode forbids all threads to free memory, but for those that say
// otherwise.
inline void check_let_go_beside_recording(Tally& tally) {
    Case given = plain("lifetime", 56);
    given.lengths = {56, 9};
    HostCall const call = make_call(given, 30);
    DeviceCall const device(call, true);
    Stream const stream;
    Stream const recording;
    auto work = std::make_unique<AttentionWork>(call.parameters);
    Status const ran = device.run(*work, stream);
    stream.wait();
    must(gpu().begin_capture(recording.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "begin a capture");
    std::thread([&work] { work.reset(); }).join();
    CUgraph graph = nullptr;
    bool const whole = gpu().end_capture(recording.get(), &graph) == CUDA_SUCCESS && graph != nullptr;
    if (graph != nullptr) {
        gpu().destroy_graph(graph);
    }
    tally.note(ran.ok() && whole, "let go by another thread beside a recording", ran.reason());
}

// Lengths are read one by one: they may stand anywhere that numbers of 4 bytes may.
inline void check_lengths_anywhere(Tally& tally) {
    Case given = plain("lengths", 48);
    given.lengths = {48, 7};
    HostCall const call = make_call(given, 31);
    DeviceCall const device(call, true);
    Buffer const shifted(std::vector<int32_t>{-1, call.key_lengths[0], call.key_lengths[1]});
    AttentionPointers pointers = device.pointers;
    pointers.inputs.back() = static_cast<char*>(shifted.get()) + sizeof(int32_t);
    Stream const stream;
    AttentionWork work(call.parameters);
    device.poison_output();
    Status const status = work.run(call.shapes, call.type, pointers, nullptr, 0, stream.get());
    stream.wait();
    std::string figures;
    bool const right = status.ok() && compare(call.type, device.output(), reference(call), figures);
    tally.note(right, "lengths between two pieces of 16 bytes", figures + status.reason());
}

}  // namespace mha_deploy::check
