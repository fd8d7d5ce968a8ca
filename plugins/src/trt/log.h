// Reasons go to TensorRT's own logger; nothing that is thrown leaves a function that TensorRT calls.
#pragma once

#include "../status.h"

#include <NvInferRuntime.h>

#include <exception>
#include <string>
#include <utility>

namespace mha_deploy::trt {

// Where TensorRT's logger can be found; before it is known, messages go to stderr.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

void log_error(char const* plugin, std::string const& reason) noexcept;

// Log the reason of a failure. The answer: whether all is well.
bool logged_ok(char const* plugin, Status const& status) noexcept;

// Call a function that may throw, for a caller that must not: what is thrown is logged, `fallback` returned.
template <typename Value, typename Function>
Value guarded(char const* plugin, Value fallback, Function&& function) noexcept {
    try {
        return std::forward<Function>(function)();
    } catch (std::exception const& error) {
        log_error(plugin, error.what());
    } catch (...) {
        log_error(plugin, "something unknown was thrown");
    }
    return fallback;
}

}  // namespace mha_deploy::trt
