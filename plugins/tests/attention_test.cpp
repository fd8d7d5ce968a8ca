// Attention against a reference in double: attention_test [--no-gpu] [--time] [--sizes] [--only TEXT]
#include "attention_device.h"
#include "attention_host.h"
#include "attention_lifetime.h"
#include "attention_list.h"
#include "attention_times.h"

#include <cstring>

int main(int count, char** arguments) {
    using namespace mha_deploy::check;
    bool no_gpu = false;
    bool time = false;
    bool sizes = false;  // only that new sizes are cheap
    std::string only;
    for (int i = 1; i < count; ++i) {
        no_gpu = no_gpu || std::strcmp(arguments[i], "--no-gpu") == 0;
        time = time || std::strcmp(arguments[i], "--time") == 0;
        sizes = sizes || std::strcmp(arguments[i], "--sizes") == 0;
        if (std::strcmp(arguments[i], "--only") == 0 && i + 1 < count) {
            only = arguments[i + 1];
        }
    }
    Tally tally;
    if (time) {
        check_installation();
        time_attention(tally, only);
        return tally.finish();
    }
    if (sizes) {
        check_installation();
        check_many_sizes(tally);
        return tally.finish();
    }
    if (only.empty()) {
        check_host(tally);
    }
    if (!no_gpu) {
        check_installation();
        uint32_t seed = 100;
        for (Case const& given : attention_list()) {
            seed += 100;
            if (given.name.find(only) != std::string::npos) {
                check_case(tally, given, seed, false);
                check_case(tally, given, seed, true);
            }
        }
        if (only.empty()) {
            check_refusals(tally);
            check_capture(tally);
            check_eviction(tally);
            check_threads(tally);
            check_lifetime(tally);
            check_many_sizes(tally);
        }
    }
    return tally.finish();
}
