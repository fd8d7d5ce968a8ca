#include "log.h"

#include <atomic>
#include <cstdio>

namespace mha_deploy::trt {

namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

void write(char const* message) {
    nvinfer1::ILoggerFinder* const finder = logger_finder.load();
    nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger == nullptr) {
        std::fprintf(stderr, "%s\n", message);
    } else {
        logger->log(nvinfer1::ILogger::Severity::kERROR, message);
    }
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
    logger_finder.store(finder);
}

void log_error(char const* plugin, std::string const& reason) noexcept {
    try {
        write((std::string(plugin) + ": " + reason).c_str());
    } catch (...) {
        // Out of memory, or the logger itself throws: there is nobody left to tell.
        std::fprintf(stderr, "%s: failed, and the reason could not be logged\n", plugin);
    }
}

bool logged_ok(char const* plugin, Status const& status) noexcept {
    if (!status.ok()) {
        log_error(plugin, status.reason());
    }
    return status.ok();
}

}  // namespace mha_deploy::trt
