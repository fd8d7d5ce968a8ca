// One attention with chosen heads as the tests state it: its tensors, and what must come out.
#pragma once

#include "../src/sparse_heads.h"
#include "check.h"

#include <functional>
#include <numeric>

namespace mha_deploy::check {

inline constexpr uint16_t kNaN = 0x7fff;  // in both types
inline constexpr int32_t kPadding = 8;    // elements before Q in a packed row

enum class Layout { kPacked, kSeparate, kHeadsFirst };

struct SparseHeadsCase {
    int32_t batch = 2;
    int32_t query_heads = 4;
    int32_t key_heads = 4;
    int32_t queries = 64;
    int32_t keys = 64;
    int32_t size = 64;
    int32_t chosen = 3;  // heads of a token; -1: another number for every token, from none to all
    Causal causal = Causal::kNone;
    Layout layout = Layout::kSeparate;
    Type type = Type::kHalf;
    bool lengths = false;

    std::string name() const {
        static char const* const corners[] = {"", " causal top left", " causal bottom right"};
        static char const* const layouts[] = {" packed", "", " heads first"};
        return std::string(type == Type::kHalf ? "fp16" : "bf16") + " B" + std::to_string(batch) + " H"
               + std::to_string(query_heads) + "/" + std::to_string(key_heads) + " S"
               + std::to_string(queries) + " T" + std::to_string(keys) + " D" + std::to_string(size) + " k"
               + std::to_string(chosen) + corners[static_cast<int>(causal)]
               + layouts[static_cast<int>(layout)] + (lengths ? " lengths" : "");
    }
};

// Rows of one operand on the host.
struct HostRows {
    std::size_t source;
    int64_t offset;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;

    std::size_t at(int64_t batch, int64_t head, int64_t row) const {
        int64_t const before = batch * batch_stride + head * head_stride + row * row_stride;
        return static_cast<std::size_t>(offset + before);
    }
};

// The tensors of a case, on the host and on the device.
class SparseHeadsData {
public:
    explicit SparseHeadsData(SparseHeadsCase const& given) : c(given) {
        lay_out();
        choose_heads();
        set_lengths();
        for (std::vector<uint16_t> const& operand : operands_) {
            device_.emplace_back(operand);
            pointers_.inputs.push_back(device_.back().get());
        }
        if (c.lengths) {
            device_.emplace_back(lengths_);
            pointers_.inputs.push_back(device_.back().get());
        }
        device_.emplace_back(gates_);
        pointers_.inputs.push_back(device_.back().get());
        device_.emplace_back(std::vector<uint16_t>(outputs(), kNaN));
        pointers_.outputs.push_back(device_.back().get());
        device_.emplace_back(sparse_heads_workspace(parameters, shapes));
    }

    Status run(Stream const& stream) {
        if (kernels_.attend == nullptr) {
            RETURN_IF_FAILED(prepare_sparse_heads(parameters, shapes, c.type, kernels_));
        }
        return run_sparse_heads(parameters, shapes, kernels_, pointers_, device_.back().get(), stream.get());
    }
    std::vector<uint16_t> y() const { return output().download<uint16_t>(); }
    // Another number of heads for every token; everything else stays.
    void set_chosen(int32_t heads) {
        c.chosen = heads;
        choose_heads();
        device_[device_.size() - 3].upload(gates_);
    }
    void forget_y() { output().upload(std::vector<uint16_t>(outputs(), kNaN)); }
    bool intact() const {
        auto const intact = [](Buffer const& buffer) { return buffer.intact(); };
        return std::all_of(device_.begin(), device_.end(), intact);
    }

    // What y must be. Where a head was not chosen, or its query sees no key, exactly zero.
    std::vector<double> exact() const {
        std::vector<std::vector<double>> numbers;
        for (std::vector<uint16_t> const& operand : operands_) {
            numbers.push_back(numbers_of(c.type, operand));
        }
        std::vector<double> y(outputs(), 0.0);
        for (int64_t batch = 0; batch < c.batch; ++batch) {
            for (int64_t token = 0; token < c.queries; ++token) {
                for (int64_t head = 0; head < c.query_heads; ++head) {
                    std::size_t const place = index(batch, token, head);
                    double const gate = number_of_bits(c.type, gates_[place]);
                    if (gate != 0.0) {
                        double* const result = &y[place * static_cast<std::size_t>(c.size)];
                        attend(numbers, batch, token, head, gate, result);
                    }
                }
            }
        }
        return y;
    }

    SparseHeadsCase c;
    AttentionParameters parameters;
    AttentionShapes shapes;

private:
    Buffer& output() { return device_[device_.size() - 2]; }
    Buffer const& output() const { return device_[device_.size() - 2]; }
    std::size_t index(int64_t batch, int64_t token, int64_t head) const {
        return static_cast<std::size_t>((batch * c.queries + token) * c.query_heads + head);
    }
    std::size_t outputs() const { return index(c.batch, 0, 0) * static_cast<std::size_t>(c.size); }

    void lay_out() {
        parameters.query_heads = c.query_heads;
        parameters.key_heads = c.key_heads;
        parameters.head_size = parameters.value_size = c.size;
        parameters.scale = 1.0F / std::sqrt(static_cast<float>(c.size));
        parameters.causal = c.causal;
        parameters.has_key_lengths = c.lengths;
        parameters.has_gates = true;
        if (c.layout == Layout::kPacked) {
            int32_t const keys_at = kPadding + c.query_heads * c.size;
            int32_t const values_at = keys_at + c.key_heads * c.size;
            int64_t const width = values_at + c.key_heads * c.size;
            parameters.sources = {0, 0, 0};
            parameters.offsets = {kPadding, keys_at, values_at};
            shapes.operands = {{c.batch, c.queries, width}};
        }
        for (std::size_t part = 0; part < 3; ++part) {
            int64_t const heads = part == 0 ? c.query_heads : c.key_heads;
            int64_t const length = part == 0 ? c.queries : c.keys;
            if (c.layout == Layout::kPacked) {
                int64_t const width = shapes.operands[0][2];
                rows_[part] = {0, parameters.offsets[part], length * width, c.size, width};
            } else if (c.layout == Layout::kSeparate) {
                shapes.operands.push_back({c.batch, length, heads * c.size});
                rows_[part] = {part, 0, length * heads * c.size, c.size, heads * c.size};
            } else {
                shapes.operands.push_back({c.batch, heads, length, c.size});
                rows_[part] = {part, 0, length * heads * c.size, length * c.size, c.size};
            }
        }
        for (Dims const& dims : shapes.operands) {
            int64_t const count = std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
            operands_.push_back(random_bits(
                c.type, static_cast<std::size_t>(count), static_cast<uint32_t>(operands_.size() + 1)));
        }
    }

    // Other heads for every token. Zeros of both signs are not chosen.
    void choose_heads() {
        std::mt19937 engine(7);
        std::uniform_real_distribution<double> gate(0.25, 2.0);
        std::vector<int64_t> heads(static_cast<std::size_t>(c.query_heads));
        std::iota(heads.begin(), heads.end(), int64_t{0});
        gates_.resize(index(c.batch, 0, 0));
        for (std::size_t token = 0; token < gates_.size() / heads.size(); ++token) {
            std::shuffle(heads.begin(), heads.end(), engine);
            std::size_t const any = engine() % (heads.size() + 1);
            std::size_t const chosen = c.chosen >= 0 ? static_cast<std::size_t>(c.chosen) : any;
            for (std::size_t i = 0; i < heads.size(); ++i) {
                uint16_t const zero = engine() % 2 == 0 ? 0 : 0x8000;
                gates_[token * heads.size() + static_cast<std::size_t>(heads[i])] =
                    i < chosen ? bits_of_number(c.type, gate(engine)) : zero;
            }
        }
    }

    // The first batch row has no key at all, the second all, the others some. Keys that do not exist are NaN.
    void set_lengths() {
        lengths_.assign(static_cast<std::size_t>(c.batch), c.keys);
        for (int32_t batch = 0; c.lengths && batch < c.batch; ++batch) {
            int32_t const length = batch == 0 ? 0 : c.keys / batch;
            lengths_[static_cast<std::size_t>(batch)] = length;
            for (std::size_t part = 1; part < 3; ++part) {
                for (int32_t head = 0; head < c.key_heads; ++head) {
                    for (int32_t key = length; key < c.keys; ++key) {
                        std::vector<uint16_t>& operand = operands_[rows_[part].source];
                        std::fill_n(&operand[rows_[part].at(batch, head, key)], c.size, kNaN);
                    }
                }
            }
        }
    }

    // How many keys a query sees.
    int64_t seen_by(int64_t batch, int64_t token) const {
        int64_t const keys = lengths_[static_cast<std::size_t>(batch)];
        if (c.causal == Causal::kNone) {
            return keys;
        }
        int64_t const shift = c.causal == Causal::kBottomRight ? keys - c.queries : 0;
        return std::clamp(token + 1 + shift, int64_t{0}, keys);
    }

    void attend(std::vector<std::vector<double>> const& numbers, int64_t batch, int64_t token, int64_t head,
        double gate, double* y) const {
        auto const row = [&](std::size_t part, int64_t of_head, int64_t place) {
            return &numbers[rows_[part].source][rows_[part].at(batch, of_head, place)];
        };
        int64_t const seen = seen_by(batch, token);
        int64_t const key_head = head / (c.query_heads / c.key_heads);
        std::vector<double> weights(static_cast<std::size_t>(seen));
        for (int64_t key = 0; key < seen; ++key) {
            double const* const query = row(0, head, token);
            double const score = std::inner_product(query, query + c.size, row(1, key_head, key), 0.0);
            weights[static_cast<std::size_t>(key)] = score * static_cast<double>(parameters.scale);
        }
        double const greatest = seen > 0 ? *std::max_element(weights.begin(), weights.end()) : 0.0;
        double total = 0.0;
        for (double& weight : weights) {
            total += weight = std::exp(weight - greatest);
        }
        for (int64_t key = 0; key < seen; ++key) {
            double const weight = gate * weights[static_cast<std::size_t>(key)] / total;
            double const* const value = row(2, key_head, key);
            for (int64_t i = 0; i < c.size; ++i) {
                y[i] += weight * value[i];
            }
        }
    }

    HostRows rows_[3]{};
    std::vector<std::vector<uint16_t>> operands_;
    std::vector<uint16_t> gates_;
    std::vector<int32_t> lengths_;
    std::vector<Buffer> device_;  // operands, lengths, gates; the output; the workspace
    AttentionPointers pointers_;
    SparseHeadsKernels kernels_;
};

}  // namespace mha_deploy::check
