// What every test of the plugins uses: the logger, what to expect, and fields to start from.
#pragma once

#include "plugin_asked.h"

#include <gtest/gtest.h>

namespace host {

inline Logger logger;
inline void expect(bool good, std::string const& what) {
    EXPECT_TRUE(good) << what << "; last reason logged: " << logger.last;
}

// That something was refused, and that the reason says the word.
inline void expect_refused(bool refused, std::string const& word, std::string const& what) {
    expect(refused && logger.last.find(word) != std::string::npos, what + ": refused, naming '" + word + "'");
    logger.last.clear();
}

inline Creator& attention() {
    return *creators()[0];
}

inline Creator& linear() {
    return *creators()[1];
}

// Grouped attention, 8 query heads and 2 key heads of 64, from three inputs.
inline FieldList attention_fields() {
    FieldList fields;
    for (char const* const name : {"causal", "has_bias", "has_key_lengths", "has_key_mask", "has_gates",
             "has_cache", "rotary", "rotary_size", "rotary_positions", "fp8", "fp8_copy"}) {
        fields.set(name, {0});
    }
    fields.set("query_heads", {8});
    fields.set("key_heads", {2});
    fields.set("head_size", {64});
    fields.set("value_size", {64});
    fields.set("left_window", {-1});
    fields.set("right_window", {-1});
    fields.set_float("scale", 0.125F);
    for (char const* const name :
        {"query_scale", "key_scale", "value_scale", "weights_scale", "output_scale"}) {
        fields.set_float(name, 0.03125F);
    }
    fields.set("sources", {0, 1, 2});
    fields.set("offsets", {0, 0, 0});
    return fields;
}

inline FieldList changed(std::string const& name, std::vector<int32_t> const& values) {
    FieldList fields = attention_fields();
    fields.set(name, values);
    return fields;
}

inline FieldList linear_fields(int32_t has_bias) {
    FieldList fields;
    fields.set("has_bias", {has_bias});
    fields.set("transposed", {0});
    fields.set("quantized", {0});
    return fields;
}

// A GEMM in FP8: words of four numbers, and a scale for each output.
inline FieldList fp8_fields(int32_t has_bias) {
    FieldList fields = linear_fields(has_bias);
    fields.set("transposed", {1});
    fields.set("quantized", {2});
    return fields;
}

inline FieldList norm_fields(int32_t operation, int32_t fp8 = 0) {
    FieldList fields;
    fields.set("operation", {operation});
    for (char const* const name : {"has_second", "packed", "has_bias", "keeps_sum"}) {
        fields.set(name, {0});
    }
    fields.set_float("epsilon", 1e-5F);
    fields.set("fp8", {fp8});
    fields.set_float("fp8_scale", 0.03125F);
    return fields;
}

inline Creator& norm_activation() {
    return *creators()[2];
}

inline FieldList packed_fields() {
    FieldList fields = changed("sources", {0, 0, 0});
    fields.set("offsets", {0, 512, 640});
    return fields;
}

}  // namespace host
