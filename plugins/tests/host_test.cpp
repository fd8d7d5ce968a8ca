// The plugins as TensorRT runs them, on a machine without a GPU: a library of this build stands for CUDA, cuDNN
// and cuBLASLt. What a call takes of the host is counted here, and threads meet here under a sanitizer.
#include "../src/handles.h"
#include "../src/linear.h"
#include "attention_host.h"
#include "fake_gpu.h"
#include "plugin_expect.h"
#include "plugin_node.h"

#include <mutex>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

using namespace host;
using mha_deploy::check::is_counting;
using mha_deploy::check::Taken;
using mha_deploy::check::taken_by;

namespace {

struct Call {
    char const* name;
    Creator& (*creator)();
    FieldList fields;
    Sizes sizes;
    std::vector<DataType> types;
};

void PrintTo(Call const& call, std::ostream* out) {
    *out << call.name;
}

std::vector<DataType> halves(std::size_t count) {
    return std::vector<DataType>(count, DataType::kHALF);
}

std::vector<Call> calls() {
    DataType const half = DataType::kHALF;
    DataType const whole = DataType::kINT32;
    Sizes const grouped{{2, 5, 512}, {2, 7, 128}, {2, 7, 128}};
    Sizes biased = grouped;
    biased.push_back({2, 8, 5, 7});
    Sizes counted = grouped;
    counted.push_back({2});
    Sizes gated = grouped;
    gated.push_back({2, 5, 8});
    FieldList cached = changed("has_cache", {1});
    cached.set("causal", {2});
    cached.set("rotary", {1});
    cached.set("rotary_size", {64});
    cached.set("rotary_positions", {1});
    FieldList narrow = changed("fp8", {1});
    narrow.set("head_size", {128});
    narrow.set("value_size", {128});
    FieldList bottom = changed("causal", {2});
    bottom.set("has_key_lengths", {1});
    FieldList masked = changed("has_key_mask", {1});
    masked.set("causal", {1});
    Sizes of_keys = grouped;
    of_keys.push_back({2, 7});
    masked.set("fp8_copy", {1});
    FieldList packed = norm_fields(4, 2);
    packed.set("packed", {1});
    FieldList residual = norm_fields(0, 1);
    residual.set("has_second", {1});
    residual.set("keeps_sum", {1});
    return {
        {"Packed", attention, packed_fields(), {{2, 5, 768}}, {half}},
        {"Fp8", attention, narrow, {{1, 5, 1024}, {1, 1100, 256}, {1, 1100, 256}}, halves(3)},
        {"Biased", attention, changed("has_bias", {1}), biased, halves(4)},
        {"Lengths", attention, changed("has_key_lengths", {1}), counted, {half, half, half, whole}},
        {"EmptyRows", attention, bottom, counted, {half, half, half, whole}},
        {"KeyMask", attention, masked, of_keys, {half, half, half, whole}},
        {"Gates", attention, changed("has_gates", {1}), gated, halves(4)},
        {"ListedGates", attention, changed("has_gates", {1}),
            {{1, 600, 512}, {1, 7, 128}, {1, 7, 128}, {1, 600, 8}}, halves(4)},
        {"Cache", attention, cached,
            {{2, 1, 512}, {2, 1, 128}, {2, 1, 128}, {2, 2, 99, 64}, {2, 2, 99, 64}, {2}, {99, 32}, {99, 32}},
            {half, half, half, half, half, whole, half, half}},
        {"Linear", linear, linear_fields(1), {{2, 40, 1024}, {1024, 520}, {520}}, halves(3)},
        {"LinearFp8", linear, fp8_fields(1), {{1, 40, 256}, {528, 256}, {528}, {528}},
            {whole, whole, half, DataType::kFLOAT}},
        {"Norm", norm_activation, residual, {{2, 5, 64}, {2, 5, 64}, {64}}, halves(3)},
        {"Activation", norm_activation, norm_fields(2), {{2, 5, 64}}, halves(1)},
        {"PackedActivation", norm_activation, packed, {{2, 5, 128}}, halves(1)},
    };
}

Call call_named(std::string const& name) {
    for (Call const& call : calls()) {
        if (name == call.name) {
            return call;
        }
    }
    throw std::out_of_range("no call of the name " + name);
}

// Device memory for everything that a call reads or writes, and what it is given of it.
struct Memory {
    std::vector<char> bytes = std::vector<char>(std::size_t{1} << 21);
    std::vector<char> space;
    std::vector<void const*> inputs;
    std::vector<void*> outputs;

    Memory(Call const& call, std::size_t workspace_bytes, std::size_t shift) : space(workspace_bytes + 512) {
        auto const begin = (reinterpret_cast<std::uintptr_t>(bytes.data()) + 255) / 256 * 256 + shift;
        void* const memory = reinterpret_cast<void*>(begin);
        inputs.assign(call.sizes.size(), memory);
        outputs.assign(3, memory);
    }
    void* workspace() {
        return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(space.data()) + 255) / 256 * 256);
    }
};

CUstream const kStream = reinterpret_cast<CUstream>(0x77);

bool enqueue(Node& node, Call const& call, Memory& memory) {
    return node.enqueue(call.sizes, call.types, memory.inputs, memory.outputs, memory.workspace(), kStream);
}

// Nothing but launches.
void expect_warm(Node& node, Call const& call, Memory& memory) {
    int const before = fake_gpu_launches();
    bool ok = true;
    Taken const taken = node.taken_by_enqueue(
        call.sizes, call.types, memory.inputs, memory.outputs, memory.workspace(), kStream, ok);
    EXPECT_TRUE(ok) << logger.last;
    EXPECT_GT(fake_gpu_launches(), before);
    EXPECT_EQ(taken.allocations, 0);
    EXPECT_EQ(taken.locks, 0);
}

class Enqueue : public ::testing::TestWithParam<Call> {};

TEST_P(Enqueue, TakesNothingOfTheHostOnceWarm) {
    Call const& call = GetParam();
    Node node(call.creator(), call.fields, call.sizes, call.types);
    ASSERT_TRUE(node.announce(call.sizes, call.types)) << logger.last;
    Memory memory(call, node.workspace_bytes, 0);
    Memory elsewhere(call, node.workspace_bytes, 256);
    ASSERT_TRUE(enqueue(node, call, memory)) << logger.last;
    expect_warm(node, call, memory);
    expect_warm(node, call, elsewhere);  // other addresses
    expect_warm(node, call, memory);
}

// TensorRT announces sizes: what they cost is paid there, and not in the call.
TEST_P(Enqueue, TakesNothingOfTheHostWhereSizesWereAnnounced) {
    Call call = GetParam();
    Node node(call.creator(), call.fields, call.sizes, call.types);
    Memory memory(call, node.workspace_bytes, 0);
    std::vector<Call> both{call, call};
    for (std::vector<int64_t>& sizes : both[1].sizes) {
        sizes[0] = sizes[0] == call.sizes[0][0] ? 1 : sizes[0];  // the batch
    }
    for (int round = 0; round < 3; ++round) {
        for (Call const& each : both) {
            ASSERT_TRUE(node.announce(each.sizes, each.types)) << logger.last;
            if (round == 0) {
                ASSERT_TRUE(enqueue(node, each, memory)) << logger.last;
            } else {
                expect_warm(node, each, memory);
            }
        }
    }
}

// Our own kernels are loaded where sizes are announced, too: not even the first call looks for them.
TEST_P(Enqueue, FindsItsKernelsReady) {
    Call const& call = GetParam();
    if (call.creator != norm_activation && std::string(call.name).find("Gates") == std::string::npos) {
        GTEST_SKIP() << "cuDNN and cuBLASLt have their own";
    }
    Node node(call.creator(), call.fields, call.sizes, call.types);
    ASSERT_TRUE(node.announce(call.sizes, call.types)) << logger.last;
    Memory memory(call, node.workspace_bytes, 0);
    bool ok = true;
    Taken const first = node.taken_by_enqueue(
        call.sizes, call.types, memory.inputs, memory.outputs, memory.workspace(), kStream, ok);
    EXPECT_TRUE(ok) << logger.last;
    EXPECT_EQ(first.locks, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Enqueue, ::testing::ValuesIn(calls()),
    [](::testing::TestParamInfo<Call> const& info) { return info.param.name; });

// Sizes beyond the first few share plans, through copies.
TEST(Sizes, RoundedOnesTakeNothingOfTheHostOnceWarm) {
    Call call = calls()[0];
    call.sizes = {{2, 90, 768}};
    Node node(attention(), call.fields, call.sizes, call.types);
    Memory memory(call, node.workspace_bytes, 0);
    for (int64_t rows = 71; rows < 80; ++rows) {
        call.sizes[0][1] = rows;
        ASSERT_TRUE(node.announce(call.sizes, call.types)) << logger.last;
        ASSERT_TRUE(enqueue(node, call, memory)) << logger.last;
        expect_warm(node, call, memory);
    }
}

TEST(Counting, SeesMemoryAndLocks) {
    if (!is_counting()) {
        GTEST_SKIP() << "a sanitizer has the functions that are counted";
    }
    std::string text = "short";
    EXPECT_EQ(taken_by([] {}).allocations, 0);
    EXPECT_EQ(taken_by([&text] { text += std::string(100, 'x'); }).allocations, 2);
    std::mutex mutex;
    EXPECT_EQ(taken_by([&mutex] { std::lock_guard<std::mutex> const lock(mutex); }).locks, 1);
}

// ---- the algorithms of GEMMs

uint64_t algorithm_of(Node& node, int64_t rows) {
    Call call = call_named("Linear");
    call.sizes[0] = {1, rows, 1024};
    Memory memory(call, node.workspace_bytes, 0);
    EXPECT_TRUE(node.announce(call.sizes, call.types) && enqueue(node, call, memory)) << logger.last;
    return fake_gpu_algorithm();
}

TEST(Algorithms, TheFastestIsMeasuredAndKeptInTheEngine) {
    Call call = call_named("Linear");
    call.sizes[0] = {1, 80, 1024};
    Node node(linear(), call.fields, call.sizes, call.types);
    EXPECT_EQ(algorithm_of(node, 80), kFakeFastest);
    EXPECT_EQ(algorithm_of(node, 64), kFakeFastest) << "a power of two below the most rows";
    EXPECT_EQ(algorithm_of(node, 77), 1U) << "cuBLASLt's first proposal, where nothing was measured";
}

#if NV_TENSORRT_MAJOR >= 10
// TensorRT is given cuBLASLt's proposals for the usual sizes as tactics, and times them itself.
TEST(Algorithms, AreTacticsThatTensorRTTimes) {
    Call call = call_named("Linear");
    call.sizes[0] = {1, 80, 1024};
    auto const inputs = typed(call.sizes, call.types);
    auto const count = static_cast<int32_t>(inputs.size());
    Node node(linear(), call.fields, call.sizes, call.types);  // for its workspace
    PluginPointer const built = create(linear(), call.fields);
    EXPECT_EQ(built->getNbTactics(), 0) << "no sizes are known";
    ASSERT_EQ(built->configurePlugin(inputs.data(), count, nullptr, 0), 0);
    std::vector<int32_t> tactics(static_cast<std::size_t>(built->getNbTactics()));
    ASSERT_EQ(tactics.size(), static_cast<std::size_t>(kFakeAlgorithms));
    ASSERT_EQ(built->getValidTactics(tactics.data(), kFakeAlgorithms), 0);
    EXPECT_EQ(std::set<int32_t>(tactics.begin(), tactics.end()).size(), tactics.size());
    workspace(*built, inputs);
    node.loaded = load(linear(), save(*built));
    std::set<uint64_t> used;
    for (int32_t const tactic : tactics) {
        EXPECT_NE(tactic, 0);
        // TensorRT may choose before or behind the clone for an execution context.
        PluginPointer const chosen(node.loaded->clone());
        EXPECT_EQ(chosen->setTactic(tactic), 0);
        node.plugin = attach(*chosen);
        uint64_t const before = algorithm_of(node, 80);
        used.insert(before);
        EXPECT_EQ(algorithm_of(node, 64), kFakeFastest) << "of sizes that TensorRT did not time";
        node.plugin = attach(*node.loaded);
        algorithm_of(node, 80);
        EXPECT_EQ(node.plugin->setTactic(tactic), 0);
        EXPECT_EQ(algorithm_of(node, 80), before);
    }
    EXPECT_EQ(used.size(), tactics.size()) << "each tactic is an algorithm of its own";
}

TEST(Algorithms, TimesAreToldApartInTensorRTsTimingCache) {
    std::set<std::string> keys;
    for (int32_t const has_bias : {0, 1}) {
        FieldList fields = linear_fields(has_bias);
        PluginPointer const plugin = create(linear(), fields);
        ASSERT_NE(plugin->getTimingCacheID(), nullptr);
        keys.insert(plugin->getTimingCacheID());
    }
    EXPECT_EQ(keys.size(), 2U);
    FieldList fields = packed_fields();
    EXPECT_EQ(create(attention(), fields)->getTimingCacheID(), nullptr) << "nothing is timed";
}

TEST(Algorithms, SmallLayersHaveNoTactics) {
    FieldList fields = linear_fields(0);
    PluginPointer const plugin = create(linear(), fields);
    auto const inputs = tensors({{1, 4, 64}, {64, 64}});
    ASSERT_EQ(plugin->configurePlugin(inputs.data(), 2, nullptr, 0), 0);
    EXPECT_EQ(plugin->getNbTactics(), 0);
}
#endif

// ---- attention before it reaches a device

template <void (*Check)(mha_deploy::check::Tally&)>
void run_check() {
    mha_deploy::check::Tally tally;
    Check(tally);
}

TEST(Attention, Fields) { run_check<mha_deploy::check::check_fields>(); }
TEST(Attention, Bytes) { run_check<mha_deploy::check::check_bytes>(); }
TEST(Attention, Shapes) { run_check<mha_deploy::check::check_sizes>(); }
TEST(Attention, Masks) { run_check<mha_deploy::check::check_masks>(); }
TEST(Attention, Plans) { run_check<mha_deploy::check::check_plan_cache>(); }
TEST(Attention, Comparator) { run_check<mha_deploy::check::check_comparator>(); }

// ---- threads

template <typename Work>
void on_threads(std::size_t count, Work const& work) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i) {
        threads.emplace_back([&work, i] { work(i); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// Execution contexts of one engine, each with a thread of its own; more threads than idle handles are kept for.
TEST(Threads, ContextsOfOneEngineRunAtTheSameTime) {
    std::vector<Call> const all = calls();
    std::vector<std::unique_ptr<Node>> nodes;
    for (Call const& call : all) {
        nodes.push_back(std::make_unique<Node>(call.creator(), call.fields, call.sizes, call.types));
        ASSERT_NE(nodes.back()->plugin, nullptr) << call.name << ": " << logger.last;
    }
    std::atomic<int> failed{0};
    on_threads(40, [&](std::size_t index) {
        std::size_t const which = index % all.size();
        Node own(*nodes[which]);
        Memory memory(all[which], own.workspace_bytes, 0);
        bool ok = own.announce(all[which].sizes, all[which].types);
        for (int round = 0; round < 20; ++round) {
            ok = enqueue(own, all[which], memory) && ok;
        }
        failed += ok ? 0 : 1;
    });
    EXPECT_EQ(failed, 0) << logger.last;
}

// Clones of one layer measure, look up and save at the same time: what is saved can always be loaded.
TEST(Threads, ClonesMeasureAndSaveAtTheSameTime) {
    FieldList fields = linear_fields(1);
    PluginPointer const built = create(linear(), fields);
    std::atomic<int> wrong{0};
    on_threads(6, [&](std::size_t index) {
        PluginPointer const clone(built->clone());
        for (int64_t round = 0; round < 4; ++round) {
            int64_t const rows = 600 + 100 * round + static_cast<int64_t>(index);
            if (index % 2 == 0) {
                wrong += workspace(*clone, tensors({{rows, 512}, {512, 512}, {512}})) > 0 ? 0 : 1;
            } else {
                wrong += load(linear(), save(*clone)) != nullptr ? 0 : 1;
            }
        }
    });
    EXPECT_EQ(wrong, 0) << logger.last;
    EXPECT_GT(save(*built).size(), save(*create(linear(), fields)).size()) << "nothing was measured";
}

TEST(Threads, EveryLaunchHasAHandleOfItsOwn) {
    mha_deploy::Driver const* driver = nullptr;
    mha_deploy::Context context;
    ASSERT_TRUE(load_driver(driver).ok());
    ASSERT_TRUE(current_context(*driver, context).ok());
    mha_deploy::Handles handles(*driver, context);
    constexpr std::size_t kMany = 40;  // more than are kept without a lock
    for (int round = 0; round < 2; ++round) {
        std::vector<std::unique_ptr<mha_deploy::CudnnHandle>> taken;
        std::set<void*> different;
        int const before = mha_deploy::counters.handles;
        for (std::size_t i = 0; i < kMany; ++i) {
            taken.push_back(std::make_unique<mha_deploy::CudnnHandle>(handles));
            ASSERT_TRUE(taken.back()->status().ok());
            different.insert(taken.back()->get());
        }
        EXPECT_EQ(different.size(), kMany);
        EXPECT_EQ(mha_deploy::counters.handles - before, round == 0 ? static_cast<int>(kMany) : 0);
    }
    std::atomic<int> shared{0};
    std::array<std::atomic<int>, 64> users{};
    on_threads(8, [&](std::size_t) {
        for (int round = 0; round < 200; ++round) {
            mha_deploy::CudnnHandle const handle(handles);
            std::atomic<int>& user = users[reinterpret_cast<std::uintptr_t>(handle.get()) / 16 % users.size()];
            shared += handle.status().ok() ? 0 : 1;
            *static_cast<void* volatile*>(handle.get()) = &user;  // a sanitizer sees two at once
        }
    });
    EXPECT_EQ(shared, 0);
}

}  // namespace

int main(int count, char** arguments) {
    ::testing::InitGoogleTest(&count, arguments);
    setLoggerFinder(&logger);
    return RUN_ALL_TESTS();
}
