// Attention of chosen heads on a GPU against sums in double. `--small` leaves out large sizes, for
// compute-sanitizer; `--time` prints times by the share of the heads.
#include "sparse_heads_data.h"

using namespace mha_deploy;
using namespace mha_deploy::check;

namespace {

using Case = SparseHeadsCase;
using Data = SparseHeadsData;

// Twice what rounding the weights and y costs.
double budget(Type type) { return type == Type::kHalf ? 6e-4 : 5e-3; }

void check_case(Tally& tally, Stream const& stream, Case const& c) {
    Data data(c);
    if (Status const status = data.run(stream); !status.ok()) {
        tally.note(false, c.name(), status.reason());
        return;
    }
    stream.wait();
    std::vector<uint16_t> const first = data.y();
    data.forget_y();
    Graph const graph(stream, [&] { return data.run(stream); });
    graph.launch();
    stream.wait();
    bool const same = graph.status.ok() && first == data.y();
    std::vector<double> const got = numbers_of(c.type, first);
    std::vector<double> const want = data.exact();
    double const error = relative_error(got, want);
    bool zeros = true;
    for (std::size_t i = 0; i < want.size(); ++i) {
        zeros = zeros && (want[i] != 0.0 || got[i] == 0.0);
    }
    tally.note(error < budget(c.type) && zeros && same && data.intact(), c.name(),
        "error " + format("%.2e", error) + (zeros ? "" : ", not zero where no head was chosen")
            + (same ? "" : ", other bits in the second run")
            + (data.intact() ? "" : ", wrote behind a tensor"));
}

// Every head size in both types: small tiles, and with many blocks large ones.
void add_sizes(std::vector<Case>& all, Type type, int32_t size) {
    Case c;
    c.type = type;
    c.size = size;
    c.layout = Layout::kPacked;
    c.causal = Causal::kTopLeft;
    c.queries = c.keys = 67;
    all.push_back(c);
    c.layout = Layout::kHeadsFirst;
    c.causal = Causal::kBottomRight;
    c.keys = 200;
    all.push_back(c);
    c.layout = Layout::kSeparate;
    c.causal = Causal::kNone;
    c.lengths = true;
    c.batch = 3;
    c.key_heads = 2;
    c.queries = 133;
    c.keys = 99;
    all.push_back(c);
    c.batch = 9;
    c.query_heads = 16;
    for (int32_t const queries : {512, 700}) {  // the longer one lists its tokens first
        for (Causal const causal : {Causal::kNone, Causal::kTopLeft}) {
            c.causal = causal;
            c.queries = queries;
            all.push_back(c);
        }
    }
}

// Numbers of chosen heads: none, one, some, all, mixed.
void add_choices(std::vector<Case>& all) {
    Case c;
    c.batch = 1;
    c.query_heads = 12;
    c.key_heads = 3;
    c.keys = 65;
    for (int32_t const chosen : {0, 1, 9, 12, -1}) {
        for (int32_t const queries : {1, 128, 513, 1300}) {
            c.chosen = chosen;
            c.queries = queries;
            all.push_back(c);
        }
    }
}

void add_masks(std::vector<Case>& all) {
    for (Causal const causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
        Case c;
        c.causal = causal;
        c.queries = 150;  // with the corner below, some of them see no key
        c.keys = 40;
        all.push_back(c);
        c.batch = 4;
        c.key_heads = 1;
        c.lengths = true;
        for (Layout const layout : {Layout::kPacked, Layout::kSeparate, Layout::kHeadsFirst}) {
            for (int32_t const queries : {1, 63, 129, 601}) {
                c.layout = layout;
                c.queries = c.keys = queries;
                all.push_back(c);
            }
        }
    }
}

std::vector<Case> cases() {
    std::vector<Case> all;
    for (Type const type : {Type::kHalf, Type::kBFloat16}) {
        for (int32_t const size : {32, 64, 96, 128}) {
            add_sizes(all, type, size);
        }
    }
    add_choices(all);
    add_masks(all);
    return all;
}

void check_refusals(Tally& tally) {
    using Change = std::function<void(AttentionParameters&, AttentionShapes&)>;
    auto const expect = [&](char const* name, Change const& change) {
        Data data(Case{});
        change(data.parameters, data.shapes);
        Status const status = check_sparse_heads(data.parameters, data.shapes);
        tally.note(!status.ok(), std::string("refuses ") + name, status.reason());
    };
    expect("a bias", [](auto& p, auto&) { p.has_bias = true; });
    expect("a window", [](auto& p, auto&) { p.left_window = 16; });
    expect("a cache", [](auto& p, auto&) { p.has_cache = true; });
    expect("a head size", [](auto& p, auto&) { p.head_size = p.value_size = 80; });
    expect("two sizes", [](auto& p, auto&) { p.value_size = 32; });
    expect("a scale of zero", [](auto& p, auto&) { p.scale = 0.0F; });
    expect("an offset", [](auto& p, auto&) { p.offsets[1] = 4; });
    expect("a row", [](auto&, auto& s) { s.operands[0][2] += 4; });
    expect("no gates", [](auto& p, auto&) { p.has_gates = false; });
}

// Times for shares of the heads; the last one is all of them.
void time_case(Stream const& stream, Case const& c) {
    Data data(c);
    std::vector<double> times;
    for (int32_t const quarters : {1, 2, 3, 4}) {
        data.set_chosen(c.query_heads * quarters / 4);
        if (Status const status = data.run(stream); !status.ok()) {
            stop(status.reason());
        }
        stream.wait();
        times.push_back(Graph(stream, [&] { return data.run(stream); }).microseconds());
    }
    for (std::size_t i = 0; i < times.size(); ++i) {
        std::printf("time B%d H%d S%d D%d%s, %zu/4 of the heads: %.2f us, %.2f of all heads\n", c.batch,
            c.query_heads, c.queries, c.size, c.causal == Causal::kNone ? "" : " causal", i + 1, times[i],
            times[i] / times.back());
    }
}

void time_cases(Stream const& stream) {
    Case c;
    c.layout = Layout::kPacked;
    c.batch = 8;
    c.query_heads = c.key_heads = 12;
    c.queries = c.keys = 128;
    time_case(stream, c);
    c.query_heads = c.key_heads = 16;
    c.queries = c.keys = 2048;
    for (Causal const causal : {Causal::kNone, Causal::kTopLeft}) {
        for (int32_t const size : {64, 128}) {
            c.causal = causal;
            c.size = size;
            time_case(stream, c);
        }
    }
}

class SparseHeads : public ::testing::TestWithParam<Case> {};

TEST_P(SparseHeads, AgreeWithDouble) {
    Case const& c = GetParam();
    if (options.small && (c.queries > 150 || c.batch * c.query_heads > 64)) {
        GTEST_SKIP() << "large";
    }
    Tally tally;
    check_case(tally, Stream(), c);
}

INSTANTIATE_TEST_SUITE_P(All, SparseHeads, ::testing::ValuesIn(cases()));

TEST(SparseHeadsRefused, All) {
    Tally tally;
    check_refusals(tally);
}

TEST(Times, DISABLED_SparseHeads) {
    time_cases(Stream());
}

}  // namespace

int main(int count, char** arguments) {
    return run_gpu_tests(count, arguments);
}
