// Golden cases of a bundle in C++: a reader of safetensors files, and the comparison with the FP64 oracle.
// It needs neither TensorRT nor CUDA.
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mha {

[[noreturn]] inline void fail(std::string const& what) {
    throw std::runtime_error(what);
}

// -- JSON, as much of it as manifests and safetensors headers hold -------------------------------------

struct Json {
    enum Kind { kNull, kBool, kNumber, kText, kList, kMap } kind{kNull};
    double number{0};
    std::string text;
    std::vector<Json> items;
    std::map<std::string, Json> members;

    Json const* find(std::string const& name) const {
        auto const it = members.find(name);
        return it == members.end() ? nullptr : &it->second;
    }
    Json const& at(std::string const& name) const {
        Json const* found = find(name);
        if (found == nullptr) fail("the JSON text has no " + name);
        return *found;
    }
};

class JsonReader {
public:
    explicit JsonReader(std::string const& text) : mText{text} {}

    Json read() {
        Json const value = readValue(0);
        skip();
        if (mAt != mText.size()) fail("there is more behind the JSON text");
        return value;
    }

private:
    static int constexpr kDeepest = 64;

    void skip() {
        while (mAt < mText.size() && std::isspace(static_cast<unsigned char>(mText[mAt]))) ++mAt;
    }
    char next() {
        skip();
        if (mAt >= mText.size()) fail("the JSON text ends too early");
        return mText[mAt];
    }
    void expect(char wanted) {
        if (next() != wanted) fail(std::string("the JSON text has no ") + wanted + " where one belongs");
        ++mAt;
    }
    bool take(char wanted) {
        if (next() != wanted) return false;
        ++mAt;
        return true;
    }
    bool takeWord(char const* word) {
        size_t const length = std::strlen(word);
        if (mText.compare(mAt, length, word) != 0) return false;
        mAt += length;
        return true;
    }

    Json readValue(int depth) {
        if (depth > kDeepest) fail("the JSON text is nested too deeply");
        Json value;
        char const first = next();
        if (first == '{') {
            value.kind = Json::kMap;
            expect('{');
            if (take('}')) return value;
            do {
                if (next() != '"') fail("a JSON key is no text");
                std::string const key = readText();
                expect(':');
                if (!value.members.emplace(key, readValue(depth + 1)).second)
                    fail("a JSON key is there twice: " + key);
            } while (take(','));
            expect('}');
        } else if (first == '[') {
            value.kind = Json::kList;
            expect('[');
            if (take(']')) return value;
            do value.items.push_back(readValue(depth + 1));
            while (take(','));
            expect(']');
        } else if (first == '"') {
            value.kind = Json::kText;
            value.text = readText();
        } else if (takeWord("true") || takeWord("false")) {
            value.kind = Json::kBool;
            value.number = mText[mAt - 2] == 'u'; // tr-u-e, fal-s-e
        } else if (!takeWord("null")) {
            char const* start = mText.c_str() + mAt;
            char* end = nullptr;
            value.kind = Json::kNumber;
            value.number = std::strtod(start, &end);
            if (end == start) fail("the JSON text has an unknown word");
            mAt += static_cast<size_t>(end - start);
        }
        return value;
    }

    std::string readText() {
        std::string found;
        for (++mAt; mAt < mText.size() && mText[mAt] != '"'; ++mAt) {
            if (mText[mAt] != '\\') {
                found += mText[mAt];
            } else if (++mAt < mText.size()) {
                char const escape = mText[mAt];
                if (escape == 'u') { // names are ASCII; anything else only has to be skipped
                    found += '?';
                    mAt += 4;
                } else {
                    found += escape == 'n' ? '\n' : escape == 't' ? '\t' : escape;
                }
            }
        }
        if (mAt >= mText.size()) fail("a JSON text does not end");
        ++mAt;
        return found;
    }

    std::string const& mText;
    size_t mAt{0};
};

inline std::string readFile(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("cannot read " + path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// -- Arrays --------------------------------------------------------------------------------------------

using Shape = std::vector<int64_t>;

inline int64_t volume(Shape const& shape) {
    int64_t count = 1;
    for (int64_t const size : shape) {
        if (size < 0 || (size > 0 && count > std::numeric_limits<int64_t>::max() / 16 / size))
            fail("a shape is too large");
        count *= size;
    }
    return count;
}

inline std::string text(Shape const& shape) {
    std::string found = "[";
    for (size_t i = 0; i < shape.size(); ++i) found += (i ? ", " : "") + std::to_string(shape[i]);
    return found + "]";
}

inline size_t itemSize(std::string const& dtype) {
    static std::map<std::string, size_t> const kSizes{{"F64", 8}, {"I64", 8}, {"F32", 4},
                                                      {"I32", 4}, {"F16", 2}, {"BF16", 2},
                                                      {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
    auto const it = kSizes.find(dtype);
    if (it == kSizes.end()) fail("no such type: " + dtype);
    return it->second;
}

inline float fromHalf(uint16_t bits) {
    int const exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
    float value;
    if (exponent == 0x1f) {
        value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    } else if (exponent == 0) {
        value = std::ldexp(static_cast<float>(fraction), -24);
    } else {
        value = std::ldexp(static_cast<float>(fraction | 0x400), exponent - 25);
    }
    return bits & 0x8000 ? -value : value;
}

struct Tensor {
    std::string dtype;
    Shape shape;
    std::string data;

    int64_t count() const { return volume(shape); }

    double at(int64_t index) const {
        char const* place = data.data() + static_cast<size_t>(index) * itemSize(dtype);
        auto const as = [place](auto value) {
            std::memcpy(&value, place, sizeof value);
            return value;
        };
        if (dtype == "F64") return as(double{});
        if (dtype == "F32") return as(float{});
        if (dtype == "I64") return static_cast<double>(as(int64_t{}));
        if (dtype == "I32") return as(int32_t{});
        if (dtype == "F16") return fromHalf(as(uint16_t{}));
        if (dtype == "BF16") {
            uint32_t const wide = static_cast<uint32_t>(as(uint16_t{})) << 16;
            float value;
            std::memcpy(&value, &wide, sizeof value);
            return value;
        }
        return static_cast<unsigned char>(*place);
    }
};

using Tensors = std::map<std::string, Tensor>;

// An integer of a JSON text; a double holds those up to 2^53.
inline int64_t wholeNumber(Json const& value) {
    if (value.kind != Json::kNumber || value.number < 0 || value.number > 9e15 ||
        value.number != std::floor(value.number))
        fail("a size in the file is no whole number");
    return static_cast<int64_t>(value.number);
}

inline Tensors readSafetensors(std::string const& path) {
    std::string const file = readFile(path);
    uint64_t length = 0;
    if (file.size() < sizeof length) fail(path + " is no safetensors file");
    std::memcpy(&length, file.data(), sizeof length);
    if (length > file.size() - sizeof length) fail(path + " ends inside its header");
    std::string const header = file.substr(sizeof length, length);
    size_t const begin = sizeof length + length, room = file.size() - begin;
    Tensors found;
    for (auto const& [name, entry] : JsonReader(header).read().members) {
        if (name == "__metadata__") continue;
        Tensor tensor;
        tensor.dtype = entry.at("dtype").text;
        for (Json const& size : entry.at("shape").items) tensor.shape.push_back(wholeNumber(size));
        std::vector<Json> const& offsets = entry.at("data_offsets").items;
        if (offsets.size() != 2) fail(path + ": " + name + " has no place");
        auto const first = static_cast<size_t>(wholeNumber(offsets[0])),
                   last = static_cast<size_t>(wholeNumber(offsets[1]));
        size_t const wanted = static_cast<size_t>(tensor.count()) * itemSize(tensor.dtype);
        if (first > last || last > room || last - first != wanted)
            fail(path + ": " + name + " is not where the header says");
        tensor.data = file.substr(begin + first, wanted);
        found.emplace(name, std::move(tensor));
    }
    return found;
}

// S entries of every batch element of a KV cache: [B, H, T, D] -> [B, H, S, D].
inline Tensor entriesFrom(Tensor const& cache, std::vector<int64_t> const& starts, int64_t S) {
    if (cache.shape.size() != 4 || static_cast<int64_t>(starts.size()) != cache.shape[0])
        fail("this is no KV cache");
    int64_t const H = cache.shape[1], T = cache.shape[2];
    size_t const entry = static_cast<size_t>(cache.shape[3]) * itemSize(cache.dtype);
    Tensor found{cache.dtype, {cache.shape[0], H, S, cache.shape[3]}, {}};
    for (int64_t b = 0; b < cache.shape[0]; ++b) {
        if (starts[b] < 0 || starts[b] + S > T) fail("the new entries are not inside the KV cache");
        for (int64_t h = 0; h < H; ++h)
            found.data.append(cache.data, static_cast<size_t>((b * H + h) * T + starts[b]) * entry,
                              static_cast<size_t>(S) * entry);
    }
    return found;
}

// -- The budget ----------------------------------------------------------------------------------------

struct Deviation {
    double relativeL2{0};
    double maxAbs{0};
    int64_t worst{0};
    bool finite{true};
};

// The error of a result against the oracle, relative to the root mean square of the oracle.
inline Deviation measure(Tensor const& got, Tensor const& oracle) {
    if (got.shape != oracle.shape) fail("shape " + text(got.shape) + ", not " + text(oracle.shape));
    Deviation found;
    double error = 0, size = 0, largest = 0;
    int64_t const count = oracle.count();
    for (int64_t i = 0; i < count; ++i) {
        double const want = oracle.at(i), value = got.at(i), off = std::abs(value - want);
        if (!std::isfinite(value) && found.finite) {
            found.finite = false;
            found.worst = i;
        }
        error += off * off;
        size += want * want;
        if (off > largest && found.finite) {
            largest = off;
            found.worst = i;
        }
    }
    double const rms = count ? std::sqrt(size / static_cast<double>(count)) : 1;
    double const unit = rms > 0 ? rms : 1;
    found.relativeL2 = count ? std::sqrt(error / static_cast<double>(count)) / unit : 0;
    found.maxAbs = largest / unit;
    return found;
}

struct Verdict {
    Deviation error;
    double share{0}; // of the budget; over 1 is too much
    bool passed{false};
};

// The budget is a multiple of the module's own error, and at least what rounding costs.
inline Verdict judge(Tensor const& got, Tensor const& oracle, Tensor const& eager, double factor) {
    static std::map<std::string, double> const kRoundoff{
        {"F16", 1.0 / 2048}, {"BF16", 1.0 / 256}, {"F32", 1.0 / 16777216}};
    auto const roundoff = kRoundoff.find(eager.dtype);
    Verdict found;
    found.error = measure(got, oracle);
    if (roundoff == kRoundoff.end()) { // integers and booleans are right or wrong
        found.passed = found.error.maxAbs <= measure(eager, oracle).maxAbs;
        found.share = found.passed ? 0 : 2;
        return found;
    }
    Deviation const own = measure(eager, oracle);
    double const l2 = factor * std::max(own.relativeL2, 0.5 * roundoff->second);
    double const abs = factor * std::max(own.maxAbs, 3.0 * roundoff->second);
    found.share = std::max(found.error.relativeL2 / l2, found.error.maxAbs / abs);
    found.passed = found.error.finite && found.share <= 1;
    return found;
}

} // namespace mha
