// Reads attention nodes from standard input, one to a line, and writes 1 for each that is accepted and 0 for
// each that is refused. Needs no GPU; tests/plugins/test_plugin_rules.py compares it with the rules in Python.
#include "attention.h"

#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>

using namespace mha_deploy;

namespace {

Dims dims_from(std::istream& line) {
    std::size_t rank = 0;
    line >> rank;
    Dims dims(rank);
    for (int64_t& dim : dims) {
        line >> dim;
    }
    return dims;
}

struct ReadField {
    std::istream& line;

    template <typename Field>
    void operator()(char const*, Field& field) const {
        if constexpr (std::is_enum_v<Field>) {
            int32_t number = 0;
            line >> number;
            field = static_cast<Field>(number);
        } else {
            line >> field;
        }
    }
    void operator()(char const*, std::array<int32_t, 3>& fields) const {
        line >> fields[0] >> fields[1] >> fields[2];
    }
};

}  // namespace

int main() {
    for (std::string text; std::getline(std::cin, text);) {
        std::istringstream line(text);
        AttentionParameters parameters;
        AttentionParameters::visit_fields(parameters, ReadField{line});
        std::size_t operands = 0;
        line >> operands;
        AttentionShapes shapes;
        for (std::size_t i = 0; i < operands; ++i) {
            shapes.operands.push_back(dims_from(line));
        }
        shapes.bias = dims_from(line);
        line >> shapes.cache_rows >> shapes.table_rows;
        if (!line) {
            std::cerr << "not a node: " << text << "\n";
            return 1;
        }
        Status const status = parameters.check();
        std::cout << (status.ok() && check_shapes(parameters, shapes).ok() ? 1 : 0) << "\n";
    }
    return 0;
}
