// A stand-in for TensorRT: a logger, size expressions, fields, and one way to ask plugins of either
// interface.
#pragma once

#include "../src/library.h"
#include "../src/trt/log.h"
#if NV_TENSORRT_MAJOR >= 10
#include "../src/trt/plugin_v3.h"
#else
#include "../src/trt/plugin_v2.h"
#endif

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace host {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorFormat;
using SizeNumber =
    std::remove_all_extents_t<decltype(nvinfer1::Dims::d)>;  // 32 bits in TensorRT 8, 64 from 10 on

class Logger final : public nvinfer1::ILogger, public nvinfer1::ILoggerFinder {
public:
    void log(Severity, char const* message) noexcept override { last = message; }
    ILogger* findLogger() override { return this; }

    std::string last;
};

inline constexpr int64_t kUnknown = -1;  // a size that is only known when the engine runs

class SizeExpression final : public nvinfer1::IDimensionExpr {
public:
    explicit SizeExpression(int64_t size) : impl_(size) { mImpl = &impl_; }

private:
    struct Impl final : nvinfer1::apiv::VDimensionExpr {
        explicit Impl(int64_t value) : size(static_cast<SizeNumber>(value)) {}
        bool isConstant() const noexcept override { return size != kUnknown; }
        SizeNumber getConstantValue() const noexcept override { return size; }
#if NV_TENSORRT_MAJOR >= 10
        bool isSizeTensor() const noexcept override { return false; }
#endif
        SizeNumber size;
    };
    Impl impl_;
};

class Expressions final : public nvinfer1::IExprBuilder {
public:
    Expressions() : impl_(*this) { mImpl = &impl_; }

    nvinfer1::IDimensionExpr const* size(int64_t value) { return &all_.emplace_back(value); }

    nvinfer1::DimsExprs sizes(std::vector<int64_t> const& values) {
        nvinfer1::DimsExprs dims{};
        dims.nbDims = static_cast<int32_t>(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
            dims.d[i] = size(values[i]);
        }
        return dims;
    }

private:
    struct Impl final : nvinfer1::apiv::VExprBuilder {
        explicit Impl(Expressions& owner) : expressions(owner) {}
        nvinfer1::IDimensionExpr const* constant(SizeNumber value) noexcept override {
            return expressions.size(value);
        }
        nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation kind,
            nvinfer1::IDimensionExpr const& one, nvinfer1::IDimensionExpr const& other) noexcept override {
            bool const known = kind == nvinfer1::DimensionOperation::kFLOOR_DIV && other.getConstantValue() > 0;
            return known ? expressions.size(one.getConstantValue() / other.getConstantValue()) : nullptr;
        }
#if NV_TENSORRT_MAJOR >= 10
        nvinfer1::IDimensionExpr const* declareSizeTensor(
            int32_t, nvinfer1::IDimensionExpr const&, nvinfer1::IDimensionExpr const&) noexcept override {
            return nullptr;
        }
#endif
        Expressions& expressions;
    };
    Impl impl_;
    std::deque<SizeExpression> all_;  // a deque: what was handed out stays where it is
};

// Fields that can be changed and left out one by one.
class FieldList {
public:
    void set(std::string const& name, std::vector<int32_t> const& values) {
        put(name, values.data(), values.size() * sizeof(int32_t), PluginFieldType::kINT32, values.size());
    }
    void set_float(std::string const& name, float value) {
        put(name, &value, sizeof(value), PluginFieldType::kFLOAT32, 1);
    }
    void put(std::string const& name, void const* bytes, std::size_t size, PluginFieldType type,
        std::size_t length) {
        remove(name);
        char const* const begin = static_cast<char const*>(bytes);
        entries_.push_back(
            {name, std::vector<char>(begin, begin + size), type, static_cast<int32_t>(length)});
    }
    void remove(std::string const& name) {
        for (std::size_t i = 0; i < entries_.size(); ++i) {
            if (entries_[i].name == name) {
                entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(i));
                return;
            }
        }
    }
    nvinfer1::PluginFieldCollection const* collection() {
        fields_.clear();
        for (Entry const& entry : entries_) {
            fields_.emplace_back(entry.name.c_str(), entry.bytes.data(), entry.type, entry.length);
        }
        collection_.nbFields = static_cast<int32_t>(fields_.size());
        collection_.fields = fields_.data();
        return &collection_;
    }

private:
    struct Entry {
        std::string name;
        std::vector<char> bytes;
        PluginFieldType type;
        int32_t length;
    };
    std::vector<Entry> entries_;
    std::vector<PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

#if NV_TENSORRT_MAJOR >= 10
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // 10 still has functions for the older interface
// Counts plugin resources as TensorRT's registry does; of the rest nothing is asked here. Which functions
// there are depends on the version, so none is marked as overriding.
class Registry final : public nvinfer1::IPluginRegistry {
public:
    struct Held {
        nvinfer1::IPluginResource* clone;
        int owners;
    };

    nvinfer1::IPluginResource* acquirePluginResource(
        char const* key, nvinfer1::IPluginResource* resource) noexcept {
        auto const found = held.find(key);
        Held& one = found != held.end() ? found->second : held[key] = Held{resource->clone(), 0};
        ++one.owners;
        return one.clone;
    }
    int32_t releasePluginResource(char const* key) noexcept {
        auto const found = held.find(key);
        if (found == held.end()) {
            return 1;
        }
        if (--found->second.owners == 0) {
            released += found->second.clone->release() == 0 ? 1 : 0;
            delete found->second.clone;
            held.erase(found);
        }
        return 0;
    }

    using Creator = nvinfer1::IPluginCreatorInterface;
    void setErrorRecorder(nvinfer1::IErrorRecorder* const) noexcept {}
    nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept { return nullptr; }
    bool isParentSearchEnabled() const { return false; }
    void setParentSearchEnabled(bool const) {}
    void* loadLibrary(char const*) noexcept { return nullptr; }
    void deregisterLibrary(void*) noexcept {}
    bool registerCreator(Creator&, char const* const) noexcept { return true; }
    Creator* const* getAllCreators(int32_t* const) const noexcept { return nullptr; }
    Creator* const* getAllCreatorsRecursive(int32_t* const) noexcept { return nullptr; }
    Creator* getCreator(char const* const, char const* const, char const* const) noexcept { return nullptr; }
    bool deregisterCreator(Creator const&) noexcept { return true; }
#if NV_TENSORRT_MAJOR == 10
    using OldCreator = nvinfer1::IPluginCreator;
    bool registerCreator(OldCreator&, char const* const) noexcept { return true; }
    OldCreator* const* getPluginCreatorList(int32_t* const) const noexcept { return nullptr; }
    OldCreator* getPluginCreator(char const* const, char const* const, char const* const) noexcept {
        return nullptr;
    }
    bool deregisterCreator(OldCreator const&) noexcept { return true; }
#endif

    std::map<std::string, Held> held;
    int released = 0;
};
#pragma GCC diagnostic pop
#endif

inline nvinfer1::Dims dims(std::vector<int64_t> const& sizes) {
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<int32_t>(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        dims.d[i] = static_cast<SizeNumber>(sizes[i]);
    }
    return dims;
}

inline std::vector<nvinfer1::DynamicPluginTensorDesc> tensors(
    std::vector<std::vector<int64_t>> const& sizes, DataType type = DataType::kHALF) {
    std::vector<nvinfer1::DynamicPluginTensorDesc> all;
    for (std::vector<int64_t> const& one : sizes) {
        nvinfer1::DynamicPluginTensorDesc tensor{};
        tensor.desc.dims = tensor.min = tensor.max = dims(one);
#if NV_TENSORRT_MAJOR >= 10
        tensor.opt = tensor.max;
#endif
        tensor.desc.type = type;
        tensor.desc.format = TensorFormat::kLINEAR;
        all.push_back(tensor);
    }
    return all;
}

inline std::vector<nvinfer1::PluginTensorDesc> plain(
    std::vector<nvinfer1::DynamicPluginTensorDesc> const& dynamic) {
    std::vector<nvinfer1::PluginTensorDesc> all;
    for (auto const& tensor : dynamic) {
        all.push_back(tensor.desc);
    }
    return all;
}

}  // namespace host
