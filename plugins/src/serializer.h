// Bytes that an engine keeps of a plugin: magic number, version, length, fields, checksum; little endian.
#pragma once

#include "status.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mha_deploy {

namespace blob {

inline constexpr std::size_t kHeaderBytes = 12;  // magic, version, bytes of the fields
inline constexpr std::size_t kChecksumBytes = 8;

// FNV-1a: enough to notice a damaged file, and it needs no library.
inline uint64_t checksum(std::byte const* bytes, std::size_t size) noexcept {
    uint64_t hash = 0xcbf29ce484222325ULL;
    for (std::size_t i = 0; i < size; ++i) {
        hash = (hash ^ static_cast<uint64_t>(bytes[i])) * 0x100000001b3ULL;
    }
    return hash;
}

template <typename Value>
uint64_t bits_of(Value value) noexcept {
    static_assert((std::is_arithmetic_v<Value> || std::is_enum_v<Value>) && sizeof(Value) <= 8,
        "only plain numbers are written");
    uint64_t bits = 0;
    if constexpr (std::is_same_v<Value, float>) {
        uint32_t word = 0;
        std::memcpy(&word, &value, sizeof(word));
        bits = word;
    } else if constexpr (std::is_same_v<Value, double>) {
        std::memcpy(&bits, &value, sizeof(bits));
    } else {
        bits = static_cast<uint64_t>(value);
    }
    return bits;
}

template <typename Value>
Value value_of(uint64_t bits) noexcept {
    Value value{};
    if constexpr (std::is_same_v<Value, float>) {
        auto const word = static_cast<uint32_t>(bits);
        std::memcpy(&value, &word, sizeof(value));
    } else if constexpr (std::is_same_v<Value, double>) {
        std::memcpy(&value, &bits, sizeof(value));
    } else if constexpr (std::is_same_v<Value, bool>) {
        value = bits != 0;
    } else {
        value = static_cast<Value>(bits);
    }
    return value;
}

}  // namespace blob

class BlobWriter {
public:
    BlobWriter(uint32_t magic, uint32_t version) {
        add(magic);
        add(version);
        add(uint32_t{0});  // the length, known at the end
    }

    template <typename Value>
    void add(Value value) {
        append(blob::bits_of(value), sizeof(Value));
    }
    template <typename Value, std::size_t Count>
    void add(std::array<Value, Count> const& values) {
        for (Value const value : values) {
            add(value);
        }
    }

    std::vector<std::byte> finish() {
        auto const length = static_cast<uint32_t>(bytes_.size() - blob::kHeaderBytes);
        for (std::size_t i = 0; i < sizeof(length); ++i) {
            bytes_[8 + i] = static_cast<std::byte>((length >> (8 * i)) & 0xffU);
        }
        append(blob::checksum(bytes_.data(), bytes_.size()), blob::kChecksumBytes);
        return std::move(bytes_);
    }

private:
    void append(uint64_t bits, std::size_t size) {
        for (std::size_t i = 0; i < size; ++i) {
            bytes_.push_back(static_cast<std::byte>((bits >> (8 * i)) & 0xffU));
        }
    }

    std::vector<std::byte> bytes_;
};

// Usage: `open`, then `take` the fields in the order they were added, then `finish`, which says whether all
// went well.
class BlobReader {
public:
    // `what` names the thing in a refusal, as in "attention".
    Status open(
        void const* bytes, std::size_t size, uint32_t magic, uint32_t version, std::string const& what) {
        what_ = what;
        bytes_ = static_cast<std::byte const*>(bytes);
        end_ = at_ = 0;
        std::size_t const frame = blob::kHeaderBytes + blob::kChecksumBytes;
        if (bytes_ == nullptr || size < frame) {
            return refused("got " + std::to_string(bytes_ == nullptr ? 0 : size)
                           + " bytes, fewer than the frame of " + std::to_string(frame));
        }
        end_ = size;
        uint32_t found_magic = 0;
        uint32_t found_version = 0;
        uint32_t length = 0;
        take(found_magic);
        take(found_version);
        take(length);
        if (found_magic != magic) {
            return refused("it was written by something else (other magic number)");
        }
        if (found_version != version) {
            return refused("got version " + std::to_string(found_version) + ", this library reads version "
                           + std::to_string(version) + "; build the engine again with this library");
        }
        if (length != size - frame) {
            return refused("got " + std::to_string(size) + " bytes, expected "
                           + std::to_string(frame + length) + ": it is cut or padded");
        }
        end_ = size - blob::kChecksumBytes;
        if (take_raw(end_, blob::kChecksumBytes) != blob::checksum(bytes_, end_)) {
            return refused("its checksum is wrong: it is damaged");
        }
        return Status();
    }

    template <typename Value>
    void take(Value& value) noexcept {
        if (end_ - at_ < sizeof(Value)) {
            short_ = true;
            return;
        }
        value = blob::value_of<Value>(take_raw(at_, sizeof(Value)));
        at_ += sizeof(Value);
    }
    template <typename Value, std::size_t Count>
    void take(std::array<Value, Count>& values) noexcept {
        for (Value& value : values) {
            take(value);
        }
    }

    Status finish() const {
        if (short_ || at_ != end_) {
            return refused("its fields are not those of this version");
        }
        return Status();
    }

private:
    uint64_t take_raw(std::size_t at, std::size_t size) const noexcept {
        uint64_t bits = 0;
        for (std::size_t i = 0; i < size; ++i) {
            bits |= static_cast<uint64_t>(bytes_[at + i]) << (8 * i);
        }
        return bits;
    }

    Status refused(std::string const& reason) const {
        return Status::failed("these bytes are no serialized " + what_ + " plugin: " + reason);
    }

    std::string what_;
    std::byte const* bytes_ = nullptr;
    std::size_t at_ = 0;
    std::size_t end_ = 0;
    bool short_ = false;
};

// Parameters with a static `visit_fields(parameters, visit)` that names each field, as bytes and back.
template <typename Parameters>
std::vector<std::byte> fields_to_bytes(Parameters const& parameters, uint32_t magic, uint32_t version) {
    BlobWriter writer(magic, version);
    Parameters::visit_fields(parameters, [&](char const*, auto const& value) { writer.add(value); });
    return writer.finish();
}

// Whatever is no such blob, or does not pass the parameters' own check, is refused.
template <typename Parameters>
Status fields_from_bytes(void const* bytes, std::size_t size, uint32_t magic, uint32_t version,
    char const* what, Parameters& parameters) {
    BlobReader reader;
    RETURN_IF_FAILED(reader.open(bytes, size, magic, version, what));
    Parameters read;
    Parameters::visit_fields(read, [&](char const*, auto& value) { reader.take(value); });
    RETURN_IF_FAILED(reader.finish());
    RETURN_IF_FAILED(read.check());
    parameters = read;
    return Status();
}

}  // namespace mha_deploy
