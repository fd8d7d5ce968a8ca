// The library handles of a CUDA context as a plugin resource of TensorRT 10 and later: its registry counts
// the plugins that are attached to execution contexts, and the handles live as long as one of them.
#pragma once

#include "../handles.h"
#include "process.h"

#include <string>

namespace mha_deploy::trt {

class HandlesResource final : public nvinfer1::IPluginResource {
public:
    HandlesResource(Driver const& driver, Context const& context) : driver_(driver), context_(context) {}

    // Only clones are registered, so only they hold something.
    HandlesResource* clone() noexcept override {
        auto* const made = new (std::nothrow) HandlesResource(driver_, context_);
        if (made != nullptr && !Handles::open(driver_, context_, made->handles_).ok()) {
            delete made;
            return nullptr;
        }
        return made;
    }
    int32_t release() noexcept override {
        handles_.reset();
        return 0;
    }

private:
    Driver const& driver_;
    Context context_;
    std::shared_ptr<Handles> handles_;
};

// One plugin's share in the handles of the current CUDA context. Without a GPU or a registry it holds
// nothing, and the layers share the handles among themselves.
class AttachedHandles {
public:
    AttachedHandles() = default;
    AttachedHandles(AttachedHandles const&) = delete;
    AttachedHandles& operator=(AttachedHandles const&) = delete;
    ~AttachedHandles() {
        if (registry_ != nullptr) {
            registry_->releasePluginResource(key_.c_str());
        }
    }

    void acquire() {
        Driver const* driver = nullptr;
        Context context;
        nvinfer1::IPluginRegistry* const registry = plugin_registry();
        if (registry == nullptr || !load_driver(driver).ok() || !current_context(*driver, context).ok()) {
            return;
        }
        key_ = "mha_deploy_handles_" + std::to_string(context.number);
        HandlesResource resource(*driver, context);
        registry_ = registry->acquirePluginResource(key_.c_str(), &resource) == nullptr ? nullptr : registry;
    }

private:
    nvinfer1::IPluginRegistry* registry_ = nullptr;  // null: nothing was acquired
    std::string key_;
};

}  // namespace mha_deploy::trt
