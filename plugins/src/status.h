// What became of a piece of work: nothing to say, or why it could not be done.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace mha_deploy {

class [[nodiscard]] Status {
public:
    Status() = default;
    static Status failed(std::string reason) {
        Status status;
        // An empty one would read as success.
        status.reason_ = reason.empty() ? "no reason was given" : std::move(reason);
        return status;
    }

    bool ok() const noexcept { return reason_.empty(); }
    std::string const& reason() const noexcept { return reason_; }

private:
    std::string reason_;
};

// Go on only where this went well; else it is what became of the caller's work, too.
#define RETURN_IF_FAILED(...) \
    do { \
        if (::mha_deploy::Status tried = (__VA_ARGS__); !tried.ok()) { \
            return tried; \
        } \
    } while (false)

// Whatever is thrown inside becomes a status: none of this may end the process that runs the engine.
template <typename Work>
Status guarded(char const* tried, Work const& work) noexcept {
    try {
        try {
            return work();
        } catch (std::exception const& error) {
            return Status::failed(std::string("could not ") + tried + ": " + error.what());
        } catch (...) {
            return Status::failed(std::string("could not ") + tried + ": unknown error");
        }
    } catch (...) {
        return Status::failed("out of memory");  // short enough to need none
    }
}

}  // namespace mha_deploy
