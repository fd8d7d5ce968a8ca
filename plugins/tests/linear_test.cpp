// Projections on a GPU against sums in double. `--small` keeps to few sizes, for compute-sanitizer; `--time`
// prints times of projections of known models.
#include "../src/linear.h"
#include "check.h"
#include "linear_times.h"

#include <thread>

using namespace mha_deploy;
using namespace mha_deploy::check;

namespace {

constexpr std::size_t kSampledRows = 24;
constexpr std::size_t kSampledColumns = 96;

// Twice what rounding y once costs. Sums in 16 bits are far above it.
double budget(Type type) { return type == Type::kHalf ? 4e-4 : 3.2e-3; }

struct Case {
    LinearShape shape;
    Type type = Type::kHalf;
    bool has_bias = true;
    std::size_t shift = 0;  // elements by which every tensor is moved away from where memory begins
    bool transposed = false;

    LinearParameters parameters() const { return {has_bias, transposed, Quantized::kNone}; }
    std::string name() const {
        return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x"
               + std::to_string(shape.outputs) + (type == Type::kHalf ? " fp16" : " bf16")
               + (has_bias ? " bias" : "") + (transposed ? " transposed" : "")
               + (shift > 0 ? " shifted by " + std::to_string(shift) : "");
    }
};

std::size_t count(int64_t rows, int64_t columns) { return static_cast<std::size_t>(rows * columns); }

// The tensors of a case, on the host and on the device.
class Data {
public:
    explicit Data(Case const& c, uint32_t seed = 1)
        : case_(c),
          x_(random_bits(c.type, count(c.shape.rows, c.shape.inputs) + c.shift, seed)),
          weight_(random_bits(c.type, count(c.shape.inputs, c.shape.outputs) + c.shift, seed + 1,
              1.0 / std::sqrt(static_cast<double>(c.shape.inputs)))),
          bias_(random_bits(c.type, count(1, c.shape.outputs) + c.shift, seed + 2)),
          device_x_(x_),
          device_weight_(weight_),
          device_bias_(bias_),
          device_y_(2 * (count(c.shape.rows, c.shape.outputs) + c.shift)) {}

    LinearPointers pointers() const {
        std::size_t const shift = case_.shift;
        auto const at = [shift](Buffer const& of) { return static_cast<uint16_t*>(of.get()) + shift; };
        void const* const bias = case_.has_bias ? at(device_bias_) : nullptr;
        return {at(device_x_), at(device_weight_), bias, at(device_y_), nullptr};
    }
    Status run(LinearWork& work, Stream const& stream, Buffer const* workspace = nullptr) const {
        void* const memory = workspace != nullptr ? workspace->get() : nullptr;
        std::size_t const bytes = workspace != nullptr ? workspace->bytes() : 0;
        return work.run(case_.shape, case_.type, pointers(), memory, bytes, stream.get());
    }
    std::vector<uint16_t> y() const {
        std::vector<uint16_t> const all = device_y_.download<uint16_t>();
        return {all.begin() + static_cast<std::ptrdiff_t>(case_.shift), all.end()};
    }
    void forget_y() { device_y_.upload(std::vector<uint16_t>(device_y_.bytes() / 2, uint16_t{0x7fff})); }
    void set_x(std::vector<uint16_t> const& x) { device_x_.upload(x_ = x); }
    bool intact() const { return device_y_.intact(); }

    // Relative error of y at places all over it, the corners among them.
    double error() const {
        std::vector<uint16_t> const bits = y();
        std::vector<double> got;
        std::vector<double> want;
        for (std::size_t const row : places(case_.shape.rows, kSampledRows)) {
            for (std::size_t const column : places(case_.shape.outputs, kSampledColumns)) {
                got.push_back(number_of_bits(case_.type, bits[row * count(1, case_.shape.outputs) + column]));
                want.push_back(exact(row, column));
            }
        }
        return relative_error(got, want);
    }

private:
    static std::vector<std::size_t> places(int64_t size, std::size_t most) {
        auto const all = static_cast<std::size_t>(size);
        std::vector<std::size_t> chosen;
        std::size_t const wanted = std::min(all, most);
        for (std::size_t i = 0; i < wanted; ++i) {
            chosen.push_back(wanted == 1 ? 0 : i * (all - 1) / (wanted - 1));
        }
        return chosen;
    }
    double exact(std::size_t row, std::size_t column) const {
        std::size_t const inputs = count(1, case_.shape.inputs);
        std::size_t const outputs = count(1, case_.shape.outputs);
        auto const number = [this](uint16_t bits) { return number_of_bits(case_.type, bits); };
        double sum = case_.has_bias ? number(bias_[case_.shift + column]) : 0.0;
        for (std::size_t k = 0; k < inputs; ++k) {
            double const x = number(x_[case_.shift + row * inputs + k]);
            std::size_t const at = case_.transposed ? column * inputs + k : k * outputs + column;
            sum += x * number(weight_[case_.shift + at]);
        }
        return sum;
    }

    Case case_;
    std::vector<uint16_t> x_, weight_, bias_;
    Buffer device_x_, device_weight_, device_bias_, device_y_;
};

// Right, the same each time and from another object, and nothing written beyond y and the workspace.
void check_case(Tally& tally, Case const& c, bool may_refuse = false) {
    Data data(c);
    LinearWork work(c.parameters());
    LinearWork other(c.parameters());
    Stream const stream;
    Status const status = data.run(work, stream);
    stream.wait();
    if (!status.ok() && may_refuse) {
        tally.refused(c.name(), status.reason());
        return;
    }
    std::vector<uint16_t> const y = data.y();
    double const error = status.ok() ? data.error() : 1.0;
    Buffer const workspace(std::max<std::size_t>(work.workspace_bytes(c.shape, c.type), 1));
    bool same = true;
    for (int i = 0; i < 6; ++i) {
        data.forget_y();
        same = data.run(i < 4 ? work : other, stream, i % 2 == 0 ? &workspace : nullptr).ok() && same;
        stream.wait();
        same = data.y() == y && same;
    }
    bool const intact = data.intact() && workspace.intact();
    tally.note(status.ok() && error < budget(c.type) && same && intact, c.name(),
        format("error %.2e", error) + (same ? "" : " not the same each time")
            + (intact ? "" : " wrote beyond") + " workspace "
            + std::to_string(work.workspace_bytes(c.shape, c.type)) + " " + status.reason());
}

// 16384 and 16383 quarters: in 16 bits each quarter is lost beside the large number, wherever that stands.
void check_accumulation(Tally& tally, Type type) {
    Case const c{{8, 16384, 64}, type, false};
    Data data(c);
    std::vector<uint16_t> x(count(8, 16384), bits_of_number(type, 0.25));
    for (std::size_t row = 0; row < 8; ++row) {
        x[row * 16384 + (row % 2 == 0 ? 0 : 16383)] = bits_of_number(type, 16384.0);
    }
    data.set_x(x);
    Buffer const ones(std::vector<uint16_t>(count(16384, 64), bits_of_number(type, 1.0)));
    LinearPointers pointers = data.pointers();
    pointers.weight = ones.get();
    LinearWork work(LinearParameters{});
    Stream const stream;
    Status const status = work.run(c.shape, type, pointers, nullptr, 0, stream.get());
    stream.wait();
    double least = 1e30;
    double most = 0.0;
    for (double const value : numbers_of(type, data.y())) {
        least = std::min(least, value);
        most = std::max(most, value);
    }
    tally.note(status.ok() && least == 20480.0 && most == 20480.0,
        std::string("sums in fp32 ") + (type == Type::kHalf ? "fp16" : "bf16"),
        format("least %.2f", least) + format(" most %.2f, want 20480", most) + " " + status.reason());
}

// A graph keeps working with new data, and after its plan would long have been forgotten.
void check_capture(Tally& tally, Case const& c, bool prepared) {
    Data data(c);
    Data const fresh(c, 77);
    LinearWork work(c.parameters());
    Stream const stream;
    Status status = prepared ? work.prepare(c.shape, c.type) : Status();
    Graph const graph(stream, [&] { return data.run(work, stream); });
    bool right = status.ok() && graph.status.ok();
    for (int64_t rows = 1; rows <= 70; ++rows) {
        Data const small({{rows, 64, 64}, c.type, c.has_bias, 0, c.transposed});
        right = small.run(work, stream).ok() && right;
        stream.wait();
    }
    double worst = 0.0;
    for (uint32_t seed = 3; seed < 6; ++seed) {
        data.set_x(random_bits(c.type, count(c.shape.rows, c.shape.inputs), seed));
        data.forget_y();
        graph.launch();
        stream.wait();
        worst = std::max(worst, data.error());
        std::vector<uint16_t> const replayed = data.y();
        right = data.run(work, stream).ok() && right;
        stream.wait();
        right = data.y() == replayed && right;
    }
    std::string const name = "graph of " + c.name() + (prepared ? "" : ", first seen in it");
    tally.note(right && worst < budget(c.type), name,
        format("error %.2e", worst) + " " + status.reason() + graph.status.reason());
}

// Two objects in two threads, both with shapes that nobody has asked for yet.
void check_threads(Tally& tally) {
    auto const work_on = [](int64_t rows, int& wrong) {
        (void)gpu();  // makes the context current in this thread
        LinearWork work(LinearParameters{true, false, Quantized::kNone});
        Stream const stream;
        for (int64_t i = 0; i < 12; ++i) {
            Data const data({{rows + i % 3, 512, 768}, i % 2 == 0 ? Type::kHalf : Type::kBFloat16, true});
            bool const ok = data.run(work, stream).ok();
            stream.wait();
            wrong += ok && data.error() < budget(i % 2 == 0 ? Type::kHalf : Type::kBFloat16) ? 0 : 1;
        }
    };
    int wrong[3] = {0, 0, 0};
    std::thread one(work_on, 201, std::ref(wrong[0]));
    std::thread two(work_on, 201, std::ref(wrong[1]));
    std::thread three(work_on, 333, std::ref(wrong[2]));
    one.join();
    two.join();
    three.join();
    int const all = wrong[0] + wrong[1] + wrong[2];
    tally.note(all == 0, "three threads", std::to_string(all) + " wrong");
}

void check_refusals(Tally& tally) {
    Case const c{{4, 64, 64}};
    Data const data(c);
    Stream const stream;
    LinearWork work(LinearParameters{true, false, Quantized::kNone});
    auto const refuses = [&](char const* name, LinearShape const& shape, Type type, LinearPointers const& p) {
        Status const status = work.run(shape, type, p, nullptr, 0, stream.get());
        tally.note(!status.ok(), std::string("refuses ") + name, status.reason());
    };
    LinearPointers const good = data.pointers();
    using Input = void const* LinearPointers::*;
    for (Input const input : {&LinearPointers::x, &LinearPointers::weight, &LinearPointers::bias}) {
        LinearPointers bad = good;
        bad.*input = nullptr;
        refuses("a null input", c.shape, c.type, bad);
    }
    refuses("a null y", c.shape, c.type, {good.x, good.weight, good.bias, nullptr, nullptr});
    void const* const odd = static_cast<char const*>(good.x) + 1;
    refuses("an odd address", c.shape, c.type, {odd, good.weight, good.bias, good.y, nullptr});
    refuses("negative rows", {-1, 64, 64}, c.type, good);
    refuses("no inputs", {4, 0, 64}, c.type, good);
    refuses("no outputs", {4, 64, 0}, c.type, good);
    refuses("too many rows", {int64_t{1} << 40, 64, 64}, c.type, good);
    refuses("another type", c.shape, static_cast<Type>(7), good);
    tally.note(work.run({0, 64, 64}, c.type, {}, nullptr, 0, stream.get()).ok(), "no rows, no work");
    tally.note(work.workspace_bytes({0, 64, 64}, c.type) == 0, "no rows, no workspace");
    tally.note(data.run(work, stream).ok(), "works after refusals");
    stream.wait();
}

// Algorithms that were measured give the same numbers, travel as bytes, and are left alone elsewhere.
void check_tuning(Tally& tally, Case const& c) {
    auto const tuning = std::make_shared<LinearTuning>();
    tuning->measure(c.parameters(), c.shape, c.type);
    LinearTuning::Record const record = tuning->record();
    std::size_t const measured = record.choices.size();
    std::vector<std::byte> bytes = serialize(c.parameters(), record);
    LinearTuning::Record read;
    LinearParameters parameters;
    bool right = measured > 5 && tuning->find(record.machine, c.shape, c.type).has_value()
                 && !tuning->find(record.machine + 1, c.shape, c.type).has_value()
                 && deserialize(bytes.data(), bytes.size(), parameters, read).ok()
                 && parameters.transposed == c.transposed && serialize(parameters, read) == bytes;
    Stream const stream;
    double worst = 0.0;
    for (bool const elsewhere : {false, true}) {
        read.machine += elsewhere ? 1 : 0;
        LinearWork work(parameters, std::make_shared<LinearTuning>(read));
        for (LinearTuning::Choice const& choice : record.choices) {
            Case small = c;
            small.shape = choice.shape;
            Data const data(small);
            right = data.run(work, stream).ok() && right;
            stream.wait();
            worst = std::max(worst, data.error());
        }
    }
    bytes[0] ^= std::byte{1};
    right = right && !deserialize(bytes.data(), bytes.size(), parameters, read).ok();
    tally.note(right && worst < budget(c.type), "measured " + c.name(),
        std::to_string(measured) + " sizes, " + format("error %.2e", worst));
}

// In FP8: right with the first and with the fastest algorithm, with one scale and one for each output, and in a
// graph that outlives the sizes of other calls.
void check_fp8(Tally& tally, LinearShape const& shape, bool has_bias, Quantized quantized) {
    LinearParameters const parameters{has_bias, true, quantized};
    auto const [rows, inputs, outputs] = shape;
    Fp8Projection const host(
        count(rows, 1), count(inputs, 1), count(outputs, 1), has_bias, quantized == Quantized::kPerOutput);
    Buffer const device_x(host.x);
    Buffer const device_weight(host.weight);
    Buffer const device_bias(host.bias);
    Buffer const device_scales(host.scales);
    Buffer const y(2 * count(rows, outputs));
    LinearPointers const pointers{device_x.get(), device_weight.get(), has_bias ? device_bias.get() : nullptr,
        y.get(), device_scales.get()};
    Stream const stream;
    auto const worst = [&]() {
        std::vector<uint16_t> const bits = y.download<uint16_t>();
        std::vector<double> got;
        std::vector<double> want;
        for (std::size_t row = 0; row < count(rows, 1); row += 1 + count(rows, 1) / kSampledRows) {
            for (std::size_t n = 0; n < count(outputs, 1); n += 1 + count(outputs, 1) / kSampledColumns) {
                want.push_back(host.exact(row, n));
                got.push_back(number_of_bits(Type::kHalf, bits[row * count(outputs, 1) + n]));
            }
        }
        return relative_error(got, want);
    };
    auto const tuning = std::make_shared<LinearTuning>();
    double error = 0.0;
    std::string reason;
    for (bool const tuned : {false, true}) {
        if (tuned) {
            tuning->measure(parameters, shape, Type::kHalf);
        }
        LinearWork work(parameters, tuning);
        Status const status = work.run(shape, Type::kHalf, pointers, nullptr, 0, stream.get());
        stream.wait();
        reason += status.reason();
        error = std::max(error, status.ok() ? worst() : 1.0);
        if (status.ok()) {
            Graph const graph(stream, [&] {
                return work.run(shape, Type::kHalf, pointers, nullptr, 0, stream.get());
            });
            for (int64_t more = 1; more <= 70; ++more) {
                reason += work.run({1 + more % rows, inputs, outputs}, Type::kHalf, pointers, nullptr, 0, stream.get()).reason();
                stream.wait();
            }
            graph.launch();
            stream.wait();
            reason += graph.status.reason();
            error = std::max(error, worst());
        }
    }
    std::string const name = "fp8 " + std::to_string(rows) + "x" + std::to_string(inputs) + "x"
                             + std::to_string(outputs) + (has_bias ? " bias" : "")
                             + (quantized == Quantized::kPerOutput ? " scale of each output" : "");
    // Tensor cores of Hopper keep 14 bits of a sum in FP8 between additions to FP32.
    tally.note(reason.empty() && error < 2e-3 && y.intact(), name,
        format("error %.2e ", error) + std::to_string(tuning->record().choices.size()) + " measured " + reason);
}

void check_fp8_refusals(Tally& tally) {
    Buffer const memory(std::size_t{1} << 20);
    Stream const stream;
    LinearWork work(LinearParameters{false, true, Quantized::kPerTensor});
    void* const good = memory.get();
    auto const refuses = [&](char const* name, LinearShape const& shape, Type type, void const* x, void const* scale) {
        Status const status = work.run(shape, type, {x, good, nullptr, good, scale}, nullptr, 0, stream.get());
        tally.note(!status.ok(), std::string("fp8 refuses ") + name, status.reason());
    };
    refuses("24 inputs", {16, 24, 64}, Type::kHalf, good, good);
    refuses("40 outputs", {16, 64, 40}, Type::kHalf, good, good);
    refuses("BF16", {16, 64, 64}, Type::kBFloat16, good, good);
    refuses("no scale", {16, 64, 64}, Type::kHalf, good, nullptr);
    refuses("an address that is no multiple of 16", {16, 64, 64}, Type::kHalf, static_cast<char*>(good) + 8, good);
}

class Linear : public ::testing::TestWithParam<Type> {
protected:
    Type const type = GetParam();
    Tally tally;
};

TEST_P(Linear, AgreesWithDouble) {
    std::vector<LinearShape> shapes{{7, 128, 384}, {100, 96, 200}};
    if (!options.small) {
        shapes.insert(shapes.end(), {{1, 4096, 6144}, {8, 768, 2304}, {1024, 768, 768}, {3072, 1024, 3072},
                                        {1, 64, 64}, {333, 512, 1536}, {129, 1024, 1000}});
        check_case(tally, {{129, 1024, 1000}, type, true, 0, true});
        check_case(tally, {{1, 4096, 6144}, type, false, 0, true});
    }
    for (LinearShape const& shape : shapes) {
        check_case(tally, {shape, type, true});
        check_case(tally, {shape, type, false});
    }
    check_case(tally, {{65, 256, 512}, type, true, 8});
}

TEST_P(Linear, OddPlacesAndSizesAreRightOrRefused) {
    if (!options.small) {
        check_case(tally, {{65, 256, 512}, type, true, 1}, true);
        check_case(tally, {{5, 97, 33}, type, true}, true);
        check_case(tally, {{6, 100, 36}, type, false}, true);
    }
}

TEST_P(Linear, Measured) {
    check_tuning(tally, {{options.small ? 16 : 64, 768, 1024}, type, false, 0, true});
    if (!options.small) {
        check_tuning(tally, {{300, 512, 768}, type, true, 0, false});
    }
}

TEST_P(Linear, SumsInFp32) {
    check_accumulation(tally, type);
}

TEST_P(Linear, Captured) {
    check_capture(tally, {{5, 64, 64}, type, true}, true);
    if (!options.small) {
        check_capture(tally, {{48, 2048, 1024}, type, true}, true);
        check_capture(tally, {{49, 4096, 512}, type, true}, false);
    }
}

INSTANTIATE_TEST_SUITE_P(All, Linear, ::testing::Values(Type::kHalf, Type::kBFloat16));

class InFp8 : public ::testing::TestWithParam<Quantized> {};

TEST_P(InFp8, AgreesWithDouble) {
    Tally tally;
    for (bool const has_bias : {false, true}) {
        check_fp8(tally, {80, 64, 48}, has_bias, GetParam());
        if (!options.small) {
            check_fp8(tally, {333, 512, 1536}, has_bias, GetParam());
            check_fp8(tally, {1, 4096, 6144}, has_bias, GetParam());
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, InFp8, ::testing::Values(Quantized::kPerTensor, Quantized::kPerOutput));

TEST(LinearCalls, Fp8Refusals) {
    Tally tally;
    check_fp8_refusals(tally);
}

TEST(LinearCalls, Threads) {
    Tally tally;
    check_threads(tally);
}

TEST(LinearCalls, Refusals) {
    Tally tally;
    check_refusals(tally);
}

TEST(Times, DISABLED_Linear) {
    time_all();
}

}  // namespace

int main(int count, char** arguments) {
    return run_gpu_tests(count, arguments);
}
