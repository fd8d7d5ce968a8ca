// This program plays TensorRT's part on a GPU, with the headers that the library is built against: create
// from fields, configure, ask for workspace, save, load, attach to a context, announce sizes, enqueue. What
// the plugins compute is compared with sums in double. `--small` keeps to sizes for compute-sanitizer. The
// tests of GEMMs have `Linear` in their names: racecheck 2025.3 does not survive cuBLASLt's kernels on Hopper.
#include "../src/driver.h"
#include "../src/linear.h"
#include "../src/norm_activation.h"
#include "check.h"
#include "plugin_expect.h"
#include "plugin_node.h"

#include <cmath>
#include <cstring>

using namespace host;
using mha_deploy::Type;
using namespace mha_deploy::check;

#if NV_TENSORRT_MAJOR >= 10
// The plugins find TensorRT's registry by this name.
static Registry registry;
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
    return &registry;
}
#endif

namespace {

// A call, and one more of the same sizes, which must take neither memory of the host nor a lock.
bool run(Node& node, Sizes const& sizes, std::vector<DataType> const& types,
    std::vector<void const*> const& inputs, std::vector<void*> const& outputs, Buffer const& memory,
    Stream const& stream) {
    bool ok = node.announce(sizes, types)
              && node.enqueue(sizes, types, inputs, outputs, memory.get(), stream.get());
    stream.wait();
    Taken const again = node.taken_by_enqueue(sizes, types, inputs, outputs, memory.get(), stream.get(), ok);
    stream.wait();
    EXPECT_EQ(again.allocations, 0) << "of the host's memory, by a call that came before";
    EXPECT_EQ(again.locks, 0) << "by a call that came before";
    return ok;
}

void note(Tally& tally, bool passed, std::string const& name, double error) {
    tally.note(passed, name, format("error %.1e ", error) + (passed ? "" : logger.last));
    logger.last.clear();
}

// ---- attention with rotary embedding and a cache: kernels/rotary_append.cu

struct RotaryCase {
    int32_t pairs;      // 1 halves, 2 neighbours
    int32_t positions;  // 0 from zero, 1 from starts, 2 per token, 3 given
    int32_t size;       // R of 64
    bool cache;
    int64_t batch, rows, room;
    bool overflows = false;
};

constexpr int32_t kQueryHeads = 4;
constexpr int32_t kKeyHeads = 2;
constexpr int32_t kSize = 64;

class RotaryData {
public:
    RotaryData(RotaryCase const& c, Type type)
        : case_(c), type_(type), width_((kQueryHeads + 2 * kKeyHeads) * kSize),
          table_rows_(c.positions == 2 ? c.batch * c.rows : 97) {
        auto const random = [type](int64_t count, uint32_t seed) {
            return random_bits(type, static_cast<std::size_t>(count), seed);
        };
        packed = random(c.batch * c.rows * width_, 1);
        cos = random(table_rows_ * c.size / 2, 2);
        sin = random(table_rows_ * c.size / 2, 3);
        past_key = random(c.batch * kKeyHeads * c.room * kSize, 4);
        past_value = random(c.batch * kKeyHeads * c.room * kSize, 5);
        for (int64_t b = 0; b < c.batch; ++b) {
            int64_t const last = c.room - c.rows;
            starts.push_back(static_cast<int32_t>(c.overflows ? last + 1
                                                  : b == 0    ? last
                                                              : (b * 5) % (last + 1)));
            for (int64_t s = 0; s < c.rows; ++s) {
                positions.push_back(static_cast<int32_t>((b * 31 + s * 7) % table_rows_));
            }
        }
    }

    // Head h of token s, rotated and rounded as the kernel does it: queries, then keys, then values.
    std::vector<double> head(int64_t b, int64_t s, int64_t h) const {
        std::size_t const begin = static_cast<std::size_t>((b * case_.rows + s) * width_ + h * kSize);
        std::vector<double> x(kSize);
        for (std::size_t d = 0; d < kSize; ++d) {
            x[d] = number_of_bits(type_, packed[begin + d]);
        }
        if (h >= kQueryHeads + kKeyHeads) {
            return x;
        }
        int64_t const token = b * case_.rows + s;
        int64_t const given[] = {s, starts[static_cast<std::size_t>(b)] + s, token,
            positions[static_cast<std::size_t>(token)]};
        int64_t const row = std::min<int64_t>(given[case_.positions], table_rows_ - 1);
        int const half = case_.size / 2;
        for (int j = 0; j < half; ++j) {
            auto const at = static_cast<std::size_t>(row * half + j);
            double const c = number_of_bits(type_, cos[at]);
            double const sine = number_of_bits(type_, sin[at]);
            auto const one = static_cast<std::size_t>(case_.pairs == 2 ? 2 * j : j);
            auto const other = static_cast<std::size_t>(case_.pairs == 2 ? 2 * j + 1 : j + half);
            double const a = x[one];
            double const d = x[other];
            x[one] = number_of_bits(type_, bits_of_number(type_, a * c - d * sine));
            x[other] = number_of_bits(type_, bits_of_number(type_, a * sine + d * c));
        }
        return x;
    }

    std::vector<double> key_or_value(bool value, int64_t b, int64_t h, int64_t t) const {
        int64_t const start = case_.cache ? starts[static_cast<std::size_t>(b)] : 0;
        if (t >= start && t < start + case_.rows) {
            return head(b, t - start, kQueryHeads + (value ? kKeyHeads : 0) + h);
        }
        auto const& past = value ? past_value : past_key;
        auto const begin = past.begin() + ((b * kKeyHeads + h) * case_.room + t) * kSize;
        return numbers_of(type_, std::vector<uint16_t>(begin, begin + kSize));
    }

    std::vector<double> expected() const {
        std::vector<double> y;
        for (int64_t b = 0; b < case_.batch; ++b) {
            int64_t const start = case_.cache ? starts[static_cast<std::size_t>(b)] : 0;
            for (int64_t s = 0; s < case_.rows; ++s) {
                for (int64_t h = 0; h < kQueryHeads; ++h) {
                    add_head(y, b, h / (kQueryHeads / kKeyHeads), head(b, s, h), start + s + 1);
                }
            }
        }
        return y;
    }

    std::vector<uint16_t> packed, cos, sin, past_key, past_value;
    std::vector<int32_t> starts, positions;
    int64_t table_rows() const { return table_rows_; }

private:
    void add_head(std::vector<double>& y, int64_t b, int64_t h, std::vector<double> const& query,
        int64_t keys) const {
        std::vector<double> scores;
        double most = -1e30;
        for (int64_t t = 0; t < keys; ++t) {
            std::vector<double> const key = key_or_value(false, b, h, t);
            double score = 0.0;
            for (std::size_t d = 0; d < kSize; ++d) {
                score += query[d] * key[d] * 0.125;
            }
            scores.push_back(score);
            most = std::max(most, score);
        }
        double sum = 0.0;
        std::vector<double> out(kSize, 0.0);
        for (int64_t t = 0; t < keys; ++t) {
            double const weight = std::exp(scores[static_cast<std::size_t>(t)] - most);
            std::vector<double> const value = key_or_value(true, b, h, t);
            sum += weight;
            for (std::size_t d = 0; d < kSize; ++d) {
                out[d] += weight * value[d];
            }
        }
        for (double const each : out) {
            y.push_back(each / sum);
        }
    }

    RotaryCase case_;
    Type type_;
    int64_t width_;
    int64_t table_rows_;
};

void check_rotary(Tally& tally, RotaryCase const& c, DataType data_type, bool separate) {
    Type const type = data_type == DataType::kHALF ? Type::kHalf : Type::kBFloat16;
    RotaryData const data(c, type);
    FieldList fields = changed("sources", {0, 0, 0});
    fields.set("query_heads", {kQueryHeads});
    fields.set("key_heads", {kKeyHeads});
    fields.set("offsets", {0, kQueryHeads * kSize, (kQueryHeads + kKeyHeads) * kSize});
    fields.set("causal", {c.cache ? 2 : 1});
    fields.set("has_cache", {c.cache ? 1 : 0});
    fields.set("rotary", {c.pairs});
    fields.set("rotary_size", {c.size});
    fields.set("rotary_positions", {c.positions});
    DataType const integer = DataType::kINT32;
    Sizes sizes{{c.batch, c.rows, (kQueryHeads + 2 * kKeyHeads) * kSize}};
    std::vector<DataType> types{data_type};
    std::vector<Buffer> memory;
    memory.reserve(10);
    std::vector<void const*> inputs;
    auto const add = [&](std::vector<int64_t> const& dims, DataType of, auto const& values) {
        sizes.push_back(dims);
        types.push_back(of);
        memory.emplace_back(values);
        inputs.push_back(memory.back().get());
    };
    memory.emplace_back(data.packed);
    inputs.push_back(memory.back().get());
    Buffer const y(elements({c.batch, c.rows, kQueryHeads * kSize}) * 2);
    Buffer const other_key(data.past_key.size() * 2 + 2);
    Buffer const other_value(data.past_value.size() * 2 + 2);
    y.fill(0xff);
    std::vector<void*> outputs{y.get()};
    if (c.cache) {
        std::vector<int64_t> const dims{c.batch, kKeyHeads, c.room, kSize};
        add(dims, data_type, data.past_key);
        outputs.push_back(separate ? other_key.get() : memory.back().get());
        add(dims, data_type, data.past_value);
        outputs.push_back(separate ? other_value.get() : memory.back().get());
        add({c.batch}, integer, data.starts);
    }
    std::vector<int64_t> table{data.table_rows(), c.size / 2};
    if (c.positions == 2) {
        table = {c.batch, c.rows, c.size / 2};
    }
    add(table, data_type, data.cos);
    add(table, data_type, data.sin);
    if (c.positions == 3) {
        add({c.batch, c.rows}, integer, data.positions);
    }
    Node node(attention(), fields, sizes, types);
    Buffer const space(node.workspace_bytes + 256);
    Stream const stream;
    bool const ran = run(node, sizes, types, inputs, outputs, space, stream);
    std::string const name = std::string("rotary ") + (c.pairs == 1 ? "halves" : "neighbours") + " of "
                             + std::to_string(c.size) + ", positions " + std::to_string(c.positions)
                             + (c.cache ? separate ? ", cache copied" : ", cache in place" : "") + ", "
                             + std::to_string(c.batch) + "x" + std::to_string(c.rows)
                             + (type == Type::kHalf ? "" : " bf16") + (c.overflows ? ", overflow" : "");
    if (c.overflows) {  // nothing is written outside of the cache
        bool intact = ran;
        for (Buffer const& each : memory) {
            intact = intact && each.intact();
        }
        tally.note(intact, name);
        return;
    }
    std::vector<double> const want = data.expected();
    double const error = ran ? relative_error(numbers_of(type, y.download<uint16_t>()), want) : 1.0;
    bool passed = ran && error < tolerance(type) && y.intact() && space.intact();
    if (passed && c.cache) {
        Buffer const& present = separate ? other_key : memory[1];
        std::vector<uint16_t> const keys = present.download<uint16_t>();
        for (int64_t b = 0; passed && b < c.batch; ++b) {
            for (int64_t t = 0; passed && t < c.room; ++t) {
                auto const begin = keys.begin() + ((b * kKeyHeads + 1) * c.room + t) * kSize;
                std::vector<double> const got =
                    numbers_of(type, std::vector<uint16_t>(begin, begin + kSize));
                passed = relative_error(got, data.key_or_value(false, b, 1, t)) < tolerance(type);
            }
        }
    }
    note(tally, passed, name, error);
}

// ---- norms and activations: kernels/norm_activation.cu

double activation(int32_t operation, double x) {
    if (operation == 2) {
        return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    }
    if (operation == 3) {
        return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    }
    return operation == 4 ? x / (1.0 + std::exp(-x)) : x;
}

// The numbers of an output in FP8, and whether each is the nearest to what is wanted, but where rounding to FP16
// or FP32 decides between two neighbours.
bool nearest_in_fp8(Buffer const& words, double scale, std::vector<double> const& want) {
    std::vector<uint8_t> const bytes = words.download<uint8_t>();
    bool near = bytes.size() == want.size();
    for (std::size_t i = 0; near && i < want.size(); ++i) {
        double const wanted = std::clamp(want[i], -448.0 * scale, 448.0 * scale);
        double const half_step = std::max(std::fabs(wanted) / 16.0, std::ldexp(scale, -10));
        near = std::fabs(number_of_fp8(bytes[i]) * scale - wanted) <= half_step * 1.02;
    }
    return near;
}

void check_norm_activation(Tally& tally, int32_t operation, int64_t rows, int64_t width, bool second,
    bool bias, DataType data_type, int32_t fp8 = 0, bool packed = false) {
    Type const type = data_type == DataType::kHALF ? Type::kHalf : Type::kBFloat16;
    bool const norm = operation < 2;
    FieldList fields = norm_fields(operation, fp8);
    fields.set("has_second", {second && !packed ? 1 : 0});
    fields.set("packed", {packed ? 1 : 0});
    fields.set("has_bias", {bias ? 1 : 0});
    fields.set("keeps_sum", {norm && second ? 1 : 0});
    constexpr float kScale = 0.005F;  // some are beyond the range
    fields.set_float("fp8_scale", kScale);
    auto const count = elements({rows, width});
    std::vector<std::vector<uint16_t>> values{random_bits(type, count, 1)};
    Sizes sizes{{rows, width}};
    if (second) {
        values.push_back(random_bits(type, count, 2));
        sizes.push_back({rows, width});
    }
    std::vector<uint16_t> beside;  // x and its factor, row by row
    for (std::size_t row = 0; packed && row < static_cast<std::size_t>(rows); ++row) {
        for (auto const& each : values) {
            auto const begin = each.begin() + static_cast<std::ptrdiff_t>(row * static_cast<std::size_t>(width));
            beside.insert(beside.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
        }
        sizes = {{rows, 2 * width}};
    }
    for (uint32_t i = 0; norm && i < (bias ? 2U : 1U); ++i) {
        values.push_back(random_bits(type, static_cast<std::size_t>(width), 3 + i));
        sizes.push_back({width});
    }
    std::vector<Buffer> memory;
    memory.reserve(values.size());
    std::vector<void const*> inputs;
    for (auto const& each : packed ? std::vector<std::vector<uint16_t>>{beside} : values) {
        memory.emplace_back(each);
        inputs.push_back(memory.back().get());
    }
    Buffer const y(count * 2);
    Buffer const sum(count * 2);
    Buffer const words(count);
    std::vector<void*> outputs{fp8 == 2 ? words.get() : y.get()};
    if (norm && second) {
        outputs.push_back(sum.get());
    }
    outputs.push_back(words.get());
    std::vector<DataType> const types(sizes.size(), data_type);
    Node node(norm_activation(), fields, sizes, types);
    Buffer const space(256);
    Stream const stream;
    bool const ran = run(node, sizes, types, inputs, outputs, space, stream);
    std::vector<double> want;
    std::vector<double> sums;
    auto const at = [&](std::size_t which, std::size_t i) { return number_of_bits(type, values[which][i]); };
    std::size_t const scale = second ? 2 : 1;
    auto const columns = static_cast<std::size_t>(width);
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
        std::vector<double> x;
        double mean = 0.0;
        for (std::size_t i = 0; i < columns; ++i) {
            x.push_back(at(0, row * columns + i) + (norm && second ? at(1, row * columns + i) : 0.0));
            mean += operation == 1 ? 0.0 : x.back() / static_cast<double>(width);
        }
        double squares = 0.0;
        for (double const each : x) {
            squares += (each - mean) * (each - mean) / static_cast<double>(width);
        }
        for (std::size_t i = 0; i < columns; ++i) {
            sums.push_back(x[i]);
            double const normal = (x[i] - mean) / std::sqrt(squares + 1e-5);
            want.push_back(norm ? normal * at(scale, i) + (bias ? at(scale + 1, i) : 0.0)
                                : activation(operation, x[i]) * (second ? at(1, row * columns + i) : 1.0));
        }
    }
    double error = ran && fp8 != 2 ? relative_error(numbers_of(type, y.download<uint16_t>()), want) : ran ? 0.0 : 1.0;
    bool const near = fp8 == 0 || (ran && nearest_in_fp8(words, static_cast<double>(kScale), want));
    if (norm && second && ran) {
        error = std::max(error, relative_error(numbers_of(type, sum.download<uint16_t>()), sums));
    }
    note(tally, ran && near && error < tolerance(type) && y.intact() && sum.intact() && words.intact(),
        "norm or activation " + std::to_string(operation) + ", " + std::to_string(rows) + "x"
            + std::to_string(width) + (second ? " second" : "") + (bias ? " bias" : "")
            + (type == Type::kHalf ? "" : " bf16") + (fp8 == 0 ? "" : near ? " fp8" : " wrong in fp8"),
        error);
}

// ---- linear layers, with an algorithm that was measured while the engine was built

void check_linear(Tally& tally, int64_t rows, bool transposed, DataType data_type) {
    Type const type = data_type == DataType::kHALF ? Type::kHalf : Type::kBFloat16;
    constexpr int64_t kInputs = 1024;  // large enough to be measured
    constexpr int64_t kOutputs = 520;
    FieldList fields = linear_fields(1);
    fields.set("transposed", {transposed ? 1 : 0});
    Sizes const weight{transposed ? std::vector<int64_t>{kOutputs, kInputs}
                                  : std::vector<int64_t>{kInputs, kOutputs}};
    Sizes const sizes{{1, rows, kInputs}, weight[0], {kOutputs}};
    std::vector<uint16_t> const x = random_bits(type, elements(sizes[0]), 1);
    std::vector<uint16_t> const w = random_bits(type, elements(sizes[1]), 2, 0.03);
    std::vector<uint16_t> const bias = random_bits(type, kOutputs, 3);
    Buffer const device_x(x);
    Buffer const device_w(w);
    Buffer const device_bias(bias);
    Buffer const y(elements({rows, kOutputs}) * 2);
    std::vector<DataType> const types(3, data_type);
    Node node(linear(), fields, sizes, types);
    Buffer const space(node.workspace_bytes + 256);
    Stream const stream;
    bool const ran = run(node,
        sizes, types, {device_x.get(), device_w.get(), device_bias.get()}, {y.get()}, space, stream);
    std::vector<double> want;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < kOutputs; ++column) {
            double sum = number_of_bits(type, bias[static_cast<std::size_t>(column)]);
            for (int64_t k = 0; k < kInputs; ++k) {
                auto const at =
                    static_cast<std::size_t>(transposed ? column * kInputs + k : k * kOutputs + column);
                sum += number_of_bits(type, x[static_cast<std::size_t>(row * kInputs + k)])
                       * number_of_bits(type, w[at]);
            }
            want.push_back(sum);
        }
    }
    double const error = ran ? relative_error(numbers_of(type, y.download<uint16_t>()), want) : 1.0;
    note(tally, ran && error < tolerance(type) && y.intact() && space.intact(),
        "linear " + std::to_string(rows) + (transposed ? " transposed" : "")
            + (type == Type::kHalf ? "" : " bf16"),
        error);
}

// Words of FP8 as TensorRT hands them over, with a scale for each output.
void check_fp8_linear(Tally& tally) {
    constexpr int64_t kRows = 40;
    constexpr int64_t kInputs = 1024;
    constexpr int64_t kOutputs = 528;
    Sizes const sizes{{1, kRows, kInputs / 4}, {kOutputs, kInputs / 4}, {kOutputs}, {kOutputs}};
    std::vector<DataType> const types{DataType::kINT32, DataType::kINT32, DataType::kHALF, DataType::kFLOAT};
    Fp8Projection const host(kRows, kInputs, kOutputs, true, true);
    Buffer const device_x(host.x);
    Buffer const device_w(host.weight);
    Buffer const device_bias(host.bias);
    Buffer const device_scales(host.scales);
    Buffer const y(elements({kRows, kOutputs}) * 2);
    Node node(linear(), fp8_fields(1), sizes, types);
    Buffer const space(node.workspace_bytes + 256);
    Stream const stream;
    bool const ran = run(node, sizes, types,
        {device_x.get(), device_w.get(), device_bias.get(), device_scales.get()}, {y.get()}, space, stream);
    std::vector<double> want;
    for (std::size_t row = 0; row < kRows; ++row) {
        for (std::size_t n = 0; n < kOutputs; ++n) {
            want.push_back(host.exact(row, n));
        }
    }
    double const error = ran ? relative_error(numbers_of(Type::kHalf, y.download<uint16_t>()), want) : 1.0;
    note(tally, ran && error < tolerance(Type::kHalf) && y.intact() && space.intact(), "linear in fp8", error);
}

void check_aliases(Tally& tally) {
#if NV_TENSORRT_MAJOR >= 10 && MHA_DEPLOY_ALIASES
    FieldList fields = changed("has_cache", {1});
    fields.set("causal", {2});
    PluginPointer const plugin = create(attention(), fields);
    bool const right = plugin != nullptr && plugin->getAliasedInput(0) == -1
                       && plugin->getAliasedInput(1) == 3 && plugin->getAliasedInput(2) == 4;
    tally.note(right, "present is declared to be the memory of past");
    FieldList without = attention_fields();
    tally.note(create(attention(), without)->getAliasedInput(0) == -1, "nothing else is aliased");
#else
    static_cast<void>(tally);
#endif
}

// Layers of one context share its handles: TensorRT's registry counts them, and the last one frees them.
void check_handles(Tally& tally) {
    Sizes const sizes{{1, 8, 1024}, {1024, 256}, {256}};
    std::vector<DataType> const types(3, DataType::kHALF);
    std::vector<Buffer> inputs;
    for (auto const& each : sizes) {
        inputs.emplace_back(random_bits(Type::kHalf, elements(each), 1));
    }
    Buffer const y(elements({8, 256}) * 2);
    Stream const stream;
    std::vector<std::unique_ptr<Node>> nodes;
    int const before = mha_deploy::counters.handles;
    bool ran = true;
    for (int i = 0; i < 4; ++i) {
        nodes.push_back(std::make_unique<Node>(linear(), linear_fields(1), sizes, types));
        Buffer const space(nodes.back()->workspace_bytes + 256);
        ran = run(*nodes.back(), sizes, types, {inputs[0].get(), inputs[1].get(), inputs[2].get()}, {y.get()},
                  space, stream)
              && ran;
        // The first one is made while the engine is built, where nothing is attached yet.
        ran = ran && mha_deploy::counters.handles - before <= 2;
    }
    tally.note(ran, "four layers share a handle", std::to_string(mha_deploy::counters.handles - before));
#if NV_TENSORRT_MAJOR >= 10
    bool const counted = registry.held.size() == 1 && registry.held.begin()->second.owners == 4;
    nodes.resize(1);
    bool const kept = registry.held.size() == 1 && registry.held.begin()->second.owners == 1;
    int const released = registry.released;
    nodes.clear();
    tally.note(counted && kept && registry.held.empty() && registry.released == released + 1,
        "the handles are a plugin resource of the execution contexts");
#endif
}

TEST(Driver, Aliases) {
    Tally tally;
    check_aliases(tally);
}

TEST(Driver, LinearInFp8) {
    Tally tally;
    check_fp8_linear(tally);
}

TEST(Driver, LinearLayersShareHandles) {
    Tally tally;
    check_handles(tally);
}

class OfType : public ::testing::TestWithParam<DataType> {
protected:
    DataType const type = GetParam();
    Tally tally;
};

TEST_P(OfType, Rotary) {
    int64_t const rows = options.small ? 5 : 33;
    for (int32_t const pairs : {1, 2}) {
        check_rotary(tally, {pairs, 0, 64, false, 2, rows, 0}, type, false);
        check_rotary(tally, {pairs, 2, 32, false, 2, rows, 0}, type, false);
        check_rotary(tally, {pairs, 3, 64, true, 3, rows, 80}, type, false);
        check_rotary(tally, {pairs, 1, 32, true, 3, 1, 70}, type, true);
    }
    check_rotary(tally, {1, 1, 64, true, 2, rows, 80}, type, false);
    check_rotary(tally, {1, 1, 64, true, 2, 4, 16, true}, type, false);
}

TEST_P(OfType, Norm) {
    for (int32_t const operation : {0, 1}) {
        check_norm_activation(tally, operation, 3, 768, true, operation == 0, type);
        check_norm_activation(tally, operation, 2, 8, false, false, type);
        check_norm_activation(tally, operation, options.small ? 1 : 5, 8200, true, true, type);
        check_norm_activation(tally, operation, options.small ? 1 : 3, 32768, false, false, type);
    }
}

TEST_P(OfType, Activation) {
    for (int32_t const operation : {2, 3, 4}) {
        check_norm_activation(tally, operation, 7, 776, operation != 2, false, type);
        check_norm_activation(tally, operation, 7, 776, true, false, type, 0, true);
    }
}

TEST_P(OfType, WrittenInFp8) {
    check_norm_activation(tally, 5, 3, 776, false, false, type, 2);
    for (int32_t fp8 = 1; fp8 <= 2; ++fp8) {
        check_norm_activation(tally, 0, 3, 768, true, true, type, fp8);
        check_norm_activation(tally, 1, 2, 8200, false, false, type, fp8);
        check_norm_activation(tally, 4, 5, 64, true, false, type, fp8);
        check_norm_activation(tally, 4, 5, 64, true, false, type, fp8, true);
    }
}

TEST_P(OfType, Linear) {
    for (bool const transposed : {false, true}) {
        check_linear(tally, options.small ? 8 : 48, transposed, type);
    }
}

#if NV_TENSORRT_MAJOR >= 10
INSTANTIATE_TEST_SUITE_P(All, OfType, ::testing::Values(DataType::kHALF, DataType::kBF16));
#else
INSTANTIATE_TEST_SUITE_P(All, OfType, ::testing::Values(DataType::kHALF));
#endif

}  // namespace

int main(int count, char** arguments) {
    setLoggerFinder(&logger);
    return run_gpu_tests(count, arguments);
}
