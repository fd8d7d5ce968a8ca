// Attention against a reference in double. `--time` prints times of known sizes, with `--only TEXT`
// of those with the text in their names.
#include "attention_device.h"
#include "attention_lifetime.h"
#include "attention_list.h"
#include "attention_times.h"

#include <cctype>

using namespace mha_deploy::check;

namespace {

struct Listed {
    Case given;
    uint32_t seed;
    bool rounded;
};

void PrintTo(Listed const& listed, std::ostream* out) {
    *out << listed.given.name;
}

std::vector<Listed> listed() {
    std::vector<Listed> all;
    uint32_t seed = 100;
    for (Case const& given : attention_list()) {
        seed += 100;
        all.push_back({given, seed, false});
        all.push_back({given, seed, true});
    }
    return all;
}

std::string name_of(::testing::TestParamInfo<Listed> const& info) {
    std::string name;
    for (char const letter : info.param.given.name + (info.param.rounded ? " rounded" : "")) {
        bool const plain = std::isalnum(static_cast<unsigned char>(letter)) != 0;
        name += letter == '<' ? "below" : letter == '>' ? "above" : letter == ',' ? "" : plain ? std::string(1, letter) : "_";
    }
    return name;
}

// What every cuDNN takes must be taken: else a missing library would look like a list of refusals.
class Attention : public ::testing::TestWithParam<Listed> {
protected:
    static void SetUpTestSuite() { check_installation(); }
    Tally tally;
};

TEST_P(Attention, AgreesWithDouble) {
    check_case(tally, GetParam().given, GetParam().seed, GetParam().rounded);
}

INSTANTIATE_TEST_SUITE_P(All, Attention, ::testing::ValuesIn(listed()), name_of);

template <void (*Check)(Tally&)>
void run_check() {
    Tally tally;
    Check(tally);
}

TEST(AttentionCalls, Refusals) { run_check<check_refusals>(); }
TEST(AttentionCalls, Capture) { run_check<check_capture>(); }
TEST(AttentionCalls, Eviction) { run_check<check_eviction>(); }
TEST(AttentionCalls, Threads) { run_check<check_threads>(); }
TEST(AttentionCalls, FreedElsewhere) { run_check<check_freed_elsewhere>(); }
TEST(AttentionCalls, GoneContext) { run_check<check_gone_context>(); }
TEST(AttentionCalls, LetGoBesideRecording) { run_check<check_let_go_beside_recording>(); }
TEST(AttentionCalls, LengthsAnywhere) { run_check<check_lengths_anywhere>(); }
TEST(AttentionCalls, ManySizes) { run_check<check_many_sizes>(); }

TEST(Times, DISABLED_Attention) {
    Tally tally;
    time_attention(tally, options.only);
}

}  // namespace

int main(int count, char** arguments) {
    return run_gpu_tests(count, arguments);
}
