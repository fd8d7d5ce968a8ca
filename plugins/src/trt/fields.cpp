#include "fields.h"

#include <cstring>
#include <limits>
#include <utility>

namespace mha_deploy::trt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

// Fields come without a promise of alignment, so they are copied out.
template <typename Value>
Value element(PluginField const& field, int32_t index) {
    Value value{};
    std::memcpy(&value,
        static_cast<char const*>(field.data) + sizeof(Value) * static_cast<std::size_t>(index),
        sizeof(Value));
    return value;
}

// TensorRT's parsers make INT32 of ONNX's integers; a caller may have 64-bit ones, where there is such a
// type.
bool is_wide_integer(PluginFieldType type) {
#if NV_TENSORRT_MAJOR >= 10
    return type == PluginFieldType::kINT64;
#else
    return static_cast<void>(type), false;
#endif
}

}  // namespace

Fields::Fields(nvinfer1::PluginFieldCollection const* collection) : collection_(collection) {}

PluginField const* Fields::find(char const* name) const {
    if (collection_ == nullptr || collection_->fields == nullptr) {
        return nullptr;
    }
    for (int32_t i = 0; i < collection_->nbFields; ++i) {
        PluginField const& field = collection_->fields[i];
        if (field.name != nullptr && std::strcmp(field.name, name) == 0) {
            return &field;
        }
    }
    return nullptr;
}

void Fields::fail(std::string reason) {
    if (status_.ok()) {
        status_ = Status::failed(std::move(reason));
    }
}

PluginField const* Fields::expect(char const* name, int32_t length) {
    PluginField const* const field = find(name);
    if (field == nullptr || field->data == nullptr) {
        fail("attribute '" + std::string(name) + "' is missing; give the node all attributes of this plugin");
        return nullptr;
    }
    if (field->length != length) {
        fail("attribute '" + std::string(name) + "' has " + std::to_string(field->length)
             + " values; give it " + std::to_string(length));
        return nullptr;
    }
    return field;
}

void Fields::take_integers(char const* name, int32_t* values, int32_t count) {
    PluginField const* const field = expect(name, count);
    if (field == nullptr) {
        return;
    }
    bool const wide = is_wide_integer(field->type);
    if (!wide && field->type != PluginFieldType::kINT32) {
        return fail("attribute '" + std::string(name) + "' is no integer (plugin field type "
                    + std::to_string(static_cast<int32_t>(field->type)) + ")");
    }
    for (int32_t i = 0; i < count; ++i) {
        int64_t const value = wide ? element<int64_t>(*field, i) : element<int32_t>(*field, i);
        if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
            return fail(
                "attribute '" + std::string(name) + "' is " + std::to_string(value) + ", beyond 32 bits");
        }
        values[i] = static_cast<int32_t>(value);
    }
}

void Fields::take(char const* name, int32_t& value) {
    take_integers(name, &value, 1);
}

void Fields::take(char const* name, std::array<int32_t, 3>& values) {
    take_integers(name, values.data(), 3);
}

int32_t Fields::take_up_to(char const* name, int32_t most) {
    int32_t taken = 0;
    take_integers(name, &taken, 1);
    if (taken < 0 || taken > most) {
        fail("attribute '" + std::string(name) + "' is " + std::to_string(taken)
             + "; give it a value from 0 to " + std::to_string(most));
        return 0;
    }
    return taken;
}

void Fields::take(char const* name, bool& value) {
    value = take_up_to(name, 1) == 1;
}

void Fields::take(char const* name, float& value) {
    PluginField const* const field = expect(name, 1);
    if (field == nullptr) {
        return;
    }
    if (field->type != PluginFieldType::kFLOAT32) {
        return fail("attribute '" + std::string(name) + "' is no 32-bit float (plugin field type "
                    + std::to_string(static_cast<int32_t>(field->type)) + ")");
    }
    value = element<float>(*field, 0);
}

}  // namespace mha_deploy::trt
