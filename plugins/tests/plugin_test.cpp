// The plugins as TensorRT meets them, without TensorRT and without a GPU: names, fields, sizes, types, bytes.
#include "plugin_expect.h"
#include "plugin_pointers.h"
#include "plugin_probe.h"

#include "../src/driver.h"

using namespace host;

namespace {

TEST(Plugin, Names) {
    expect(creators().size() == 3, "three plugins");
    expect(std::string(attention().getPluginName()) == "MhaDeployAttention", "name of the attention plugin");
    expect(std::string(linear().getPluginName()) == "MhaDeployLinear", "name of the linear plugin");
    for (Creator* const creator : creators()) {
        expect(std::string(creator->getPluginVersion()) == "1", "plugin version");
        expect(std::string(creator->getPluginNamespace()) == "mha_deploy", "plugin namespace");
    }
    expect(attention().getFieldNames()->nbFields == 25, "25 fields of attention");
    expect(linear().getFieldNames()->nbFields == 3, "3 fields of linear");
    expect(creators()[2]->getFieldNames()->nbFields == 8, "8 fields of norm and activation");
    std::string const info = mha_deploy_plugins_info();
    for (char const* const part :
        {"\"library\": \"mha_deploy_plugins\"", "\"interface\": \"IPluginV", "\"tensorrt\": \"",
            "\"cudnn_frontend\": \"1.", "MhaDeployAttention", "MhaDeployLinear", "MhaDeployNormActivation",
            "\"architectures\": ["}) {
        expect(info.find(part) != std::string::npos, std::string("the library describes itself: ") + part);
    }
}

TEST(Plugin, Fp8Fields) {
    FieldList untransposed = fp8_fields(0);
    untransposed.set("transposed", {0});
    expect_refused(create(linear(), untransposed) == nullptr, "transposed", "FP8 with a weight [K, N]");
    FieldList unknown = fp8_fields(0);
    unknown.set("quantized", {3});
    expect_refused(create(linear(), unknown) == nullptr, "quantized", "another way to quantize");
    FieldList copy = norm_fields(5);
    expect_refused(create(norm_activation(), copy) == nullptr, "FP8", "a copy that is not in FP8");
    FieldList without_scale = norm_fields(0, 1);
    without_scale.set_float("fp8_scale", 0.0F);
    expect_refused(create(norm_activation(), without_scale) == nullptr, "scale", "a scale of zero");
}

TEST(Plugin, Fields) {
    FieldList good = attention_fields();
    PluginPointer const plugin = create(attention(), good);
    expect(plugin != nullptr && name_of(*plugin) == "MhaDeployAttention" && plugin->getNbOutputs() == 1,
        "attention from fields");
    nvinfer1::PluginFieldCollection const* const names = attention().getFieldNames();
    for (int32_t i = 0; i < names->nbFields; ++i) {
        FieldList fields = attention_fields();
        fields.remove(names->fields[i].name);
        expect_refused(create(attention(), fields) == nullptr, names->fields[i].name, "a field is missing");
    }
    FieldList nothing;
    expect_refused(create(linear(), nothing) == nullptr, "has_bias", "linear without its field");
    FieldList whole_scale = attention_fields();
    whole_scale.set("scale", {1});
    expect_refused(create(attention(), whole_scale) == nullptr, "scale", "an integer as scale");
    FieldList broken_heads = attention_fields();
    broken_heads.set_float("query_heads", 8.0F);
    expect_refused(create(attention(), broken_heads) == nullptr, "query_heads", "a float as heads");
}

TEST(Plugin, RefusedValues) {
    struct Case {
        char const* name;
        std::vector<int32_t> values;
        char const* word;
    };
    for (Case const& one : std::vector<Case>{
             {"causal", {3}, "causal"},
             {"causal", {-1}, "causal"},
             {"has_bias", {2}, "has_bias"},
             {"sources", {0, 1}, "sources"},
             {"offsets", {0, 0, 0, 0}, "offsets"},
             {"query_heads", {7}, "query_heads"},
             {"query_heads", {0}, "query_heads"},
             {"key_heads", {0}, "key_heads"},
             {"head_size", {60}, "head_size"},
             {"value_size", {512}, "value_size"},
             {"left_window", {-2}, "left_window"},
             {"sources", {0, 1, 3}, "sources"},
             {"sources", {0, 2, 2}, "sources"},
             {"offsets", {0, -8, 0}, "offsets"},
             {"offsets", {0, 4, 0}, "offsets"},
             {"rotary", {3}, "rotary"},
             {"rotary", {1}, "rotary_size"},
             {"rotary_positions", {4}, "rotary_positions"},
         }) {
        FieldList fields = changed(one.name, one.values);
        expect_refused(
            create(attention(), fields) == nullptr, one.word, std::string("bad value of ") + one.name);
    }
    FieldList both = changed("has_cache", {1});
    both.set("has_key_lengths", {1});
    expect_refused(create(attention(), both) == nullptr, "key_lengths", "a cache with lengths");
    FieldList rotary = changed("rotary", {1});
    rotary.set("rotary_size", {64});
    expect(create(attention(), rotary) != nullptr, "a rotary embedding of whole heads");
    rotary.set("rotary_size", {24});
    expect_refused(create(attention(), rotary) == nullptr, "rotary_size", "halves of no whole loads");
    rotary.set("rotary_size", {32});
    rotary.set("rotary_positions", {1});
    expect_refused(create(attention(), rotary) == nullptr, "cache", "positions from starts without a cache");
#if NV_TENSORRT_MAJOR >= 10
    int64_t const wide = 8;
    int64_t const too_wide = int64_t{1} << 40;
    FieldList fields = attention_fields();
    fields.put("query_heads", &wide, sizeof(wide), PluginFieldType::kINT64, 1);
    expect(create(attention(), fields) != nullptr, "a 64-bit integer is taken");
    fields.put("query_heads", &too_wide, sizeof(too_wide), PluginFieldType::kINT64, 1);
    expect_refused(create(attention(), fields) == nullptr, "32 bits", "a number that is too wide");
#endif
}

using Sizes = std::vector<std::vector<int64_t>>;

bool ask_sizes(FieldList fields, Creator& creator, Sizes const& inputs, Sizes& outputs) {
    Expressions builder;
    std::vector<nvinfer1::DimsExprs> input_dims;
    std::vector<nvinfer1::DimsExprs> output_expressions;
    for (std::vector<int64_t> const& sizes : inputs) {
        input_dims.push_back(builder.sizes(sizes));
    }
    PluginPointer const plugin = create(creator, fields);
    outputs.clear();
    if (plugin == nullptr || !output_dims(*plugin, input_dims, builder, output_expressions)) {
        return false;
    }
    for (nvinfer1::DimsExprs const& dims : output_expressions) {
        std::vector<int64_t>& sizes = outputs.emplace_back();
        for (int32_t i = 0; i < dims.nbDims; ++i) {
            sizes.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : kUnknown);
        }
    }
    return true;
}

void expect_sizes(FieldList const& fields, Creator& creator, Sizes const& inputs, Sizes const& expected,
    std::string const& what) {
    Sizes got;
    expect(ask_sizes(fields, creator, inputs, got) && got == expected, "output sizes: " + what);
}

void expect_sizes_refused(FieldList const& fields, Creator& creator, Sizes const& inputs,
    std::string const& word, std::string const& what) {
    Sizes got;
    expect_refused(!ask_sizes(fields, creator, inputs, got), word, "sizes: " + what);
}

TEST(Plugin, Sizes) {
    FieldList const three = attention_fields();
    FieldList const packed = packed_fields();
    FieldList values = changed("value_size", {128});
    FieldList cached = changed("has_cache", {1});
    cached.set("causal", {2});
    Sizes const caches{{2, 2, 99, 64}, {2, 2, 99, 64}};
    expect_sizes(three, attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}}, {{2, 5, 512}}, "rank 3");
    expect_sizes(three, attention(), {{2, 8, 5, 64}, {2, 2, 7, 64}, {2, 2, 7, 64}}, {{2, 5, 512}}, "rank 4");
    expect_sizes(
        values, attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 256}}, {{2, 5, 1024}}, "other value size");
    expect_sizes(packed, attention(), {{2, 5, 768}}, {{2, 5, 512}}, "packed");
    expect_sizes(changed("fp8_copy", {1}), attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}},
        {{2, 5, 512}, {2, 5, 128}}, "attention with a copy in FP8");
    expect_sizes(changed("fp8", {1}), attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}}, {{2, 5, 128}},
        "attention in FP8");
    expect_sizes(
        packed, attention(), {{kUnknown, kUnknown, 768}}, {{kUnknown, kUnknown, 512}}, "unknown sizes");
    expect_sizes(cached, attention(), {{2, 1, 512}, {2, 1, 128}, {2, 1, 128}, caches[0], caches[1], {2}},
        {{2, 1, 512}, caches[0], caches[1]}, "cache");
    expect_sizes(linear_fields(1), linear(), {{2, 5, 64}, {64, 32}, {32}}, {{2, 5, 32}}, "linear");
    expect_sizes(
        fp8_fields(1), linear(), {{2, 5, 16}, {32, 16}, {32}, {32}}, {{2, 5, 32}}, "linear in FP8");
    expect_sizes_refused(
        fp8_fields(0), linear(), {{2, 5, 16}, {32, 16}, {1}}, "[1]", "one scale for all outputs in FP8");
    FieldList besides = norm_fields(0, 1);
    besides.set("has_second", {1});
    besides.set("keeps_sum", {1});
    expect_sizes(besides, norm_activation(), {{2, 5, 64}, {2, 5, 64}, {64}},
        {{2, 5, 64}, {2, 5, 64}, {2, 5, 16}}, "a norm in FP8 besides");
    FieldList halves = norm_fields(4);
    halves.set("packed", {1});
    expect_sizes(halves, norm_activation(), {{2, 5, 128}}, {{2, 5, 64}}, "an activation and its factor");
    expect_sizes_refused(halves, norm_activation(), {{2, 5, 127}}, "127", "halves of an odd width");
    FieldList masked = changed("has_key_mask", {1});
    expect_sizes(masked, attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}, {2, 7}}, {{2, 5, 512}}, "key mask");
    expect_sizes_refused(masked, attention(), {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}, {2, 5}}, "key_mask",
        "a key mask of other keys");
    expect_sizes(norm_fields(5, 2), norm_activation(), {{2, 5, 64}}, {{2, 5, 16}}, "a copy in FP8");
    expect_sizes_refused(three, attention(), {{2, 512}, {2, 128}, {2, 128}}, "[2, 512]", "rank 2");
    expect_sizes_refused(packed, attention(), {{kUnknown, 768}}, "rank", "unknown sizes of rank 2");
    expect_sizes_refused(packed, attention(), {{2, 5, 760}}, "760", "offsets outside of a row");
    expect_sizes_refused(packed, attention(), {{2, 5, 768}, {2}}, "2 inputs", "an input too many");
    expect_sizes_refused(changed("has_key_lengths", {1}), attention(),
        {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}, {3}}, "key_lengths", "lengths of another batch");
    expect_sizes_refused(cached, attention(),
        {{2, 1, 512}, {2, 1, 128}, {2, 1, 128}, caches[0], {2, 2, 98, 64}, {2}}, "past_value",
        "caches that differ");
    expect_sizes_refused(cached, attention(),
        {{2, 1, 512}, {2, 1, 128}, {2, 1, 128}, {2, 2, 99}, caches[1], {2}}, "past_key", "a cache of rank 3");
    expect_sizes_refused(changed("has_gates", {1}), attention(),
        {{2, 5, 512}, {2, 7, 128}, {2, 7, 128}, {2, 5, 7}}, "gates", "gates of other heads");
    expect_sizes_refused(
        linear_fields(0), linear(), {{2, 5, 64}, {63, 32}}, "[63, 32]", "a weight that does not fit");
    expect_sizes_refused(
        linear_fields(1), linear(), {{2, 5, 64}, {64, 32}, {31}}, "[31]", "a bias that does not fit");
}

TEST(Plugin, Types) {
    FieldList fields = changed("has_key_lengths", {1});
    PluginPointer const plugin = create(attention(), fields);
    auto const asked = [&](int32_t position, DataType first, DataType type, TensorFormat format) {
        auto all = tensors({{2, 5, 512}, {2, 7, 128}, {2, 7, 128}, {2}, {2, 5, 512}}, first);
        all[static_cast<std::size_t>(position)].desc.type = type;
        all[static_cast<std::size_t>(position)].desc.format = format;
        return supports(*plugin, position, all, 1);
    };
    TensorFormat const linear_format = TensorFormat::kLINEAR;
    for (int32_t const position : {0, 1, 2, 4}) {
        std::string const where = " at " + std::to_string(position);
        expect(asked(position, DataType::kHALF, DataType::kHALF, linear_format), "FP16" + where);
        expect(!asked(position, DataType::kFLOAT, DataType::kFLOAT, linear_format), "no FP32" + where);
        expect(!asked(position, DataType::kINT8, DataType::kINT8, linear_format), "no INT8" + where);
        expect(!asked(position, DataType::kHALF, DataType::kHALF, TensorFormat::kCHW2),
            "no other format" + where);
    }
    expect(!asked(1, DataType::kHALF, DataType::kFLOAT, linear_format), "no mixed types");
    expect(asked(3, DataType::kHALF, DataType::kINT32, linear_format), "INT32 lengths");
    expect(!asked(3, DataType::kHALF, DataType::kHALF, linear_format), "no FP16 lengths");
#if NV_TENSORRT_MAJOR >= 10
    expect(asked(4, DataType::kBF16, DataType::kBF16, linear_format), "BF16");
    expect(!asked(4, DataType::kHALF, DataType::kBF16, linear_format), "no BF16 with FP16");
#endif
}

TEST(Plugin, Bytes) {
    FieldList fields = packed_fields();
    Bytes const bytes = save(*create(attention(), fields));
    PluginPointer const loaded = load(attention(), bytes);
    expect(loaded != nullptr && save(*loaded) == bytes, "the same bytes after saving, loading and saving");
    FieldList others = attention_fields();
    expect(save(*create(attention(), others)) != bytes, "other parameters, other bytes");
    expect_refused(
        load(attention(), Bytes(bytes.begin(), bytes.end() - 1)) == nullptr, "cut", "bytes cut short");
    expect_refused(load(attention(), Bytes()) == nullptr, "0 bytes", "no bytes");
    expect_refused(load(attention(), Bytes(bytes.size(), 'x')) == nullptr, "something else", "foreign bytes");
    Bytes newer = bytes;
    newer[4] = 9;
    expect_refused(load(attention(), newer) == nullptr, "version 9", "bytes of a newer library");
    Bytes damaged = bytes;
    damaged[bytes.size() / 2] = static_cast<char>(damaged[bytes.size() / 2] ^ 1);
    expect_refused(load(attention(), damaged) == nullptr, "checksum", "damaged bytes");
    FieldList for_linear = linear_fields(1);
    Bytes const of_linear = save(*create(linear(), for_linear));
    PluginPointer const loaded_linear = load(linear(), of_linear);
    expect(loaded_linear != nullptr && save(*loaded_linear) == of_linear, "linear after saving and loading");
    expect_refused(load(attention(), of_linear) == nullptr, "something else", "bytes of the other plugin");
}

TEST(Plugin, Clones) {
    FieldList fields = packed_fields();
    PluginPointer plugin = create(attention(), fields);
    Bytes const bytes = save(*plugin);
    PluginPointer const copy(plugin->clone());
    PluginPointer const of_context = attach(*plugin);
    plugin.reset();
    expect(copy != nullptr && save(*copy) == bytes, "a clone outlives its model");
    expect(
        of_context != nullptr && of_context != copy && save(*of_context) == bytes, "a clone for a context");
}

TEST(Plugin, WithoutGpu) {
    FieldList fields = packed_fields();
    PluginPointer const plugin = create(attention(), fields);
    auto const inputs = tensors({{2, 5, 768}});
    expect(workspace(*plugin, inputs) % 256 == 0, "the workspace is whole lines of memory");
    mha_deploy::Driver const* driver = nullptr;
    if (mha_deploy::load_driver(driver).ok()) {
        GTEST_SKIP() << "this machine has a GPU";
    }
    logger.last.clear();
    expect(configure(*plugin, inputs) && logger.last.empty(), "sizes are taken without a GPU");
    configure(*plugin, tensors({{2, 5, 760}}));
    expect(logger.last.find("760") != std::string::npos, "and sizes that do not fit are refused");
    void const* const pointers[] = {nullptr};
    void* const outputs[] = {nullptr};
    int32_t const answer =
        plugin->enqueue(plain(inputs).data(), nullptr, pointers, outputs, nullptr, nullptr);
    expect_refused(answer != 0, "driver", "a call without a GPU");
}

TEST(Plugin, WorkspaceAndExceptions) {
    Creator creator(mha_deploy::trt::probe_kind());
    FieldList nothing;
    PluginPointer const plugin = create(creator, nothing);
    for (int64_t const rows : {3, 1, 2}) {
        std::size_t const asked = workspace(*plugin, tensors({{rows}}));
        expect(asked == static_cast<std::size_t>(rows) * 1024, "workspace, rounded up");
    }
    PluginPointer const loaded = load(creator, save(*plugin));
    int memory = 0;
    void const* const inputs[] = {&memory};
    void* const outputs[] = {&memory};
    auto const run = [&](void* space) {
        return loaded->enqueue(plain(tensors({{3}})).data(), nullptr, inputs, outputs, space, nullptr);
    };
    expect_refused(
        run(&memory) != 0, "probe of 1024 bytes", "the least that was asked for travels with the engine");
    expect_refused(run(nullptr) != 0, "probe of 0 bytes", "no workspace was given");
    expect_refused(plugin->clone() == nullptr, "bad_alloc", "no memory for a clone");
    Expressions builder;
    std::vector<nvinfer1::DimsExprs> dims;
    expect_refused(
        !output_dims(*plugin, {builder.sizes({1})}, builder, dims), "bad_alloc", "no memory for sizes");
}

TEST(Plugin, Registration) {
    char const* const reason = mha_deploy_register_plugins();
    bool const reported = reason != nullptr && std::strstr(reason, "libnvinfer") != nullptr;
    expect(reported, "registering without a TensorRT in the process says what is missing");
}

TEST(Plugin, Pointers) {
    expect_pointers();
}

}  // namespace

int main(int count, char** arguments) {
    ::testing::InitGoogleTest(&count, arguments);
    setLoggerFinder(&logger);
    return RUN_ALL_TESTS();
}
