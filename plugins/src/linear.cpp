#include "linear.h"

#include "cublas_lt.h"
#include "driver.h"
#include "handles.h"
#include "serializer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <new>
#include <optional>
#include <utility>

namespace mha_deploy {
namespace {

constexpr uint32_t kMagic = 0x4c41484d;  // "MHAL"
constexpr uint32_t kVersion = 4;

constexpr uint32_t kFullAlignment = 256;                   // bytes: what CUDA's and TensorRT's memory has
constexpr uint64_t kWorkspaceLimit = uint64_t{32} << 20;  // what cuBLAS takes for itself on Hopper, too

// Shapes that one object keeps ready. Those whose memory a graph uses come on top: they stay with the object.
constexpr std::size_t kPlans = 32;

// Partial sums of a split K in FP32, added in a fixed order. The other schemes keep them in 16 bits, which is
// what these projections are here to avoid.
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

// Names of cuBLASLt 12.9; headers before it do not have them.
constexpr auto kWeightScaleMode = static_cast<cublasLtMatmulDescAttributes_t>(31);
constexpr auto kInputScaleMode = static_cast<cublasLtMatmulDescAttributes_t>(32);
constexpr int32_t kScalePerOutput = 3;  // ..._SCALE_OUTER_VEC_32F: of both factors, or of none

constexpr int64_t kFp8Step = 16;  // inputs and outputs of a GEMM in FP8 are multiples of it
constexpr uint32_t kOne = 0x3f800000U;  // 1.0F

std::string matrix(int64_t rows, int64_t columns) {
    return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

// One projection as cuBLASLt states it, with an algorithm. Of one thread at a time: a launch writes the
// address of the bias into it.
class Matmul {
public:
    // Needs a GPU, launches nothing. Takes the given algorithm where there is one that still fits, else the
    // one that the library proposes first.
    Status make(Driver const& driver, CublasLt const& library, cublasLtHandle_t handle,
        LinearProblem const& problem, cublasLtMatmulAlgo_t const* algorithm) {
        library_ = &library;
        handle_ = handle;
        problem_ = problem;
        if (problem.parameters.quantized == Quantized::kPerOutput) {
            // The scale of x is in those of the outputs, but each row is to have one.
            RETURN_IF_FAILED(ones_.allocate(driver, static_cast<std::size_t>(problem.shape.rows) * sizeof(float)));
            RETURN_IF_FAILED(ones_.fill(kOne));
        }
        RETURN_IF_FAILED(describe());
        cublasLtMatmulHeuristicResult_t result{};
        bool const fits = algorithm != nullptr
                          && library.check_algorithm(handle, operation_.get(), weight_.get(), x_.get(),
                                 y_.get(), y_.get(), algorithm, &result)
                                 == CUBLAS_STATUS_SUCCESS
                          && result.workspaceSize <= kWorkspaceLimit;
        if (fits) {
            use(*algorithm, result.workspaceSize);
            return Status();
        }
        std::vector<cublasLtMatmulHeuristicResult_t> first;
        Status status = propose(1, first);
        if (status.ok()) {
            use(first[0].algo, first[0].workspaceSize);
        }
        return status;
    }

    // At least one algorithm, the library's favourite first.
    Status propose(int most, std::vector<cublasLtMatmulHeuristicResult_t>& found) {
        LtPreference preference(nullptr, nullptr);
        RETURN_IF_FAILED(make_preference(preference));
        found.resize(static_cast<std::size_t>(most));
        int count = 0;
        cublasStatus_t const status = library_->find_algorithms(handle_, operation_.get(), weight_.get(),
            x_.get(), y_.get(), y_.get(), preference.get(), most, found.data(), &count);
        found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<std::size_t>(count) : 0);
        found.erase(std::remove_if(found.begin(), found.end(),
                        [](auto const& each) { return each.state != CUBLAS_STATUS_SUCCESS; }),
            found.end());
        if (found.empty()) {
            return Status::failed("cuBLASLt has no algorithm for " + problem_.text() + "; got \""
                                  + name_of(status) + "\"; try sizes that are multiples of 8");
        }
        return Status();
    }

    void use(cublasLtMatmulAlgo_t const& algorithm, std::size_t workspace_bytes) {
        algorithm_ = algorithm;
        workspace_bytes_ = workspace_bytes;
    }

    Status launch(LinearPointers const& pointers, void* workspace, CUstream stream) {
        RETURN_IF_FAILED(set_bias(pointers.bias));
        RETURN_IF_FAILED(set_scale(pointers.scale));
        float const one = 1.0F;
        float const zero = 0.0F;
        cublasStatus_t const status = library_->multiply(handle_, operation_.get(), &one, pointers.weight,
            weight_.get(), pointers.x, x_.get(), &zero, pointers.y, y_.get(), pointers.y, y_.get(),
            &algorithm_, workspace, workspace_bytes_, stream);
        if (status == CUBLAS_STATUS_SUCCESS) {
            return Status();  // before any text is made: this is every call
        }
        return status_of(status, "launch " + problem_.text());
    }

    LinearProblem const& problem() const { return problem_; }
    std::size_t workspace_bytes() const { return workspace_bytes_; }
    bool has_memory() const { return ones_.address() != 0; }

private:
    // cuBLASLt's matrices are column-major: a row-major matrix is its transpose to it, so it is asked for
    // y^T [N, rows] = W^T [N, K] x^T [K, rows], which moves nothing. Its bias has one number for each row.
    Status describe() {
        auto const [rows, inputs, outputs] = problem_.shape;
        bool const transposed = problem_.parameters.transposed;
        cublasLtMatmulDesc_t made = nullptr;
        Status status =
            status_of(library_->create_operation(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a GEMM");
        if (!status.ok()) {
            return status;
        }
        operation_ = LtOperation(made, library_->destroy_operation);
        cublasOperation_t const operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        status = status_of(
            library_->set_operation(made, CUBLASLT_MATMUL_DESC_TRANSA, &operation, sizeof(operation)),
            "transpose the weight of a GEMM");
        if (status.ok() && problem_.parameters.has_bias) {
            cublasLtEpilogue_t const epilogue = CUBLASLT_EPILOGUE_BIAS;
            status = status_of(
                library_->set_operation(made, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)),
                "add a bias to a GEMM");
        }
        cudaDataType_t const wide = problem_.type == Type::kHalf ? CUDA_R_16F : CUDA_R_16BF;
        cudaDataType_t const narrow = problem_.parameters.in_fp8() ? CUDA_R_8F_E4M3 : wide;
        if (status.ok()) {
            status = make_layout(weight_, narrow, transposed ? inputs : outputs, transposed ? outputs : inputs);
        }
        if (status.ok()) {
            status = make_layout(x_, narrow, inputs, rows);
        }
        if (status.ok()) {
            status = make_layout(y_, wide, outputs, rows);
        }
        if (status.ok() && problem_.parameters.quantized == Quantized::kPerOutput) {
            status = scale_each_output();
        }
        // The library reads the alignment of these from their addresses, and no more: any such number does.
        auto const* const aligned = reinterpret_cast<void const*>(uintptr_t{problem_.alignment});
        if (status.ok()) {
            status = set_bias(aligned);
        }
        return status.ok() ? set_scale(aligned) : status;
    }

    Status scale_each_output() {
        auto const set = [this](cublasLtMatmulDescAttributes_t attribute, auto const& value) {
            return status_of(library_->set_operation(operation_.get(), attribute, &value, sizeof(value)),
                "scale each output of a GEMM in FP8, which needs cuBLASLt 12.9");
        };
        RETURN_IF_FAILED(set(kWeightScaleMode, kScalePerOutput));
        RETURN_IF_FAILED(set(kInputScaleMode, kScalePerOutput));
        return set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, reinterpret_cast<void const*>(ones_.address()));
    }

    Status make_layout(LtLayout& layout, cudaDataType_t type, int64_t rows, int64_t columns) const {
        cublasLtMatrixLayout_t made = nullptr;
        cublasStatus_t const status = library_->create_layout(
            &made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
        if (status == CUBLAS_STATUS_SUCCESS) {
            layout = LtLayout(made, library_->destroy_layout);
        }
        return status_of(status, "describe the matrices of " + problem_.text());
    }

    Status make_preference(LtPreference& preference) const {
        cublasLtMatmulPreference_t made = nullptr;
        Status status = status_of(library_->create_preference(&made), "describe what algorithms are wanted");
        preference = LtPreference(made, library_->destroy_preference);
        auto const set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto const& value) {
            if (status.ok()) {
                status = status_of(
                    library_->set_preference(made, attribute, &value, sizeof(value)), "limit the algorithms");
            }
        };
        set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceLimit);
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions);
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem_.alignment);
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem_.alignment);
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem_.alignment);
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem_.alignment);
        return status;
    }

    Status set_bias(void const* bias) {
        return problem_.parameters.has_bias ? set_address(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, bias_)
                                            : Status();
    }
    Status set_scale(void const* scale) {
        return problem_.parameters.in_fp8() ? set_address(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale, scale_)
                                            : Status();
    }
    Status set_address(cublasLtMatmulDescAttributes_t attribute, void const* address, void const*& known) {
        if (address == known) {
            return Status();
        }
        cublasStatus_t const status =
            library_->set_operation(operation_.get(), attribute, &address, sizeof(address));
        if (status != CUBLAS_STATUS_SUCCESS) {
            return status_of(status, "set the bias or the scale");
        }
        known = address;
        return Status();
    }

    CublasLt const* library_ = nullptr;
    cublasLtHandle_t handle_ = nullptr;
    LinearProblem problem_;
    LtOperation operation_{nullptr, nullptr};
    LtLayout weight_{nullptr, nullptr};
    LtLayout x_{nullptr, nullptr};
    LtLayout y_{nullptr, nullptr};
    void const* bias_ = nullptr;  // the one that is written into the operation
    void const* scale_ = nullptr;
    DeviceMemory ones_;
    cublasLtMatmulAlgo_t algorithm_{};
    std::size_t workspace_bytes_ = 0;
};

uint64_t machine_of(Driver const& driver, CublasLt const& library) {
    CUdevice device = 0;
    uint64_t number = library.version();
    if (driver.current_device(&device) != CUDA_SUCCESS) {
        return 0;
    }
    for (CUdevice_attribute const attribute :
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT}) {
        int value = 0;
        if (driver.device_attribute(&value, attribute, device) != CUDA_SUCCESS) {
            return 0;
        }
        number = number * 1024 + static_cast<uint64_t>(value);
    }
    return number;
}

// ---- measuring, while an engine is built

constexpr int kProposals = 10;
constexpr std::size_t kRounds = 5;
constexpr double kMeasuringSeconds = 1.5;  // for all sizes of one projection
constexpr float kHopeless = 1.1F;  // an algorithm that begins ten per cent behind is not compared further
constexpr std::size_t kRotatedBytes = std::size_t{96} << 20;  // weights of several layers do not stay in L2
constexpr int64_t kSmallBytes = int64_t{1} << 20;  // a GEMM that moves less takes no longer than its launch

double operations_of(LinearShape const& shape) {
    return 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.inputs)
           * static_cast<double>(shape.outputs);
}

// Another algorithm than the first is taken from two per cent on, in most rounds. Large GEMMs run at the
// power limit of a GPU, where times of the same algorithm differ by more: five.
float worthwhile(LinearShape const& shape) {
    return operations_of(shape) > 5e10 ? 0.95F : 0.98F;
}

// Launches of one algorithm: a small GEMM is shorter than its launch, but not within a graph.
class Launches {
public:
    explicit Launches(Driver const& driver) : driver_(driver) {}
    Launches(Launches&& other) noexcept
        : driver_(other.driver_), graph_(std::exchange(other.graph_, nullptr)),
          executable_(std::exchange(other.executable_, nullptr)) {}
    Launches(Launches const&) = delete;
    Launches& operator=(Launches const&) = delete;
    Launches& operator=(Launches&&) = delete;
    ~Launches() {
        if (executable_ != nullptr) {
            driver_.destroy_executable(executable_);
        }
        if (graph_ != nullptr) {
            driver_.destroy_graph(graph_);
        }
    }

    template <typename Work>
    bool record(CUstream stream, Work const& work) {
        if (driver_.begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED) != CUDA_SUCCESS) {
            return false;
        }
        bool const launched = work();
        bool const ended = driver_.end_capture(stream, &graph_) == CUDA_SUCCESS;
        return launched && ended && driver_.instantiate(&executable_, graph_, 0) == CUDA_SUCCESS;
    }
    bool launch(CUstream stream) const { return driver_.launch_graph(executable_, stream) == CUDA_SUCCESS; }

private:
    Driver const& driver_;
    CUgraph graph_ = nullptr;
    CUgraphExec executable_ = nullptr;
};

// Memory, stream and events for measuring one projection at any number of rows up to the most.
class Bench {
public:
    Bench(Driver const& driver, CublasLt const& library, cublasLtHandle_t handle)
        : driver_(driver), library_(library), handle_(handle) {}
    Bench(Bench const&) = delete;
    Bench& operator=(Bench const&) = delete;
    ~Bench() {
        for (CUevent const event : events_) {
            driver_.destroy_event(event);
        }
        if (stream_ != nullptr) {
            driver_.destroy_stream(stream_);
        }
    }

    bool open(LinearShape const& most, bool in_fp8) {
        auto const bytes = [](int64_t rows, int64_t columns, int64_t each) {
            return static_cast<std::size_t>(rows * columns * each + kFullAlignment - 1) / kFullAlignment
                   * kFullAlignment;
        };
        int64_t const each = in_fp8 ? 1 : 2;
        weight_bytes_ = bytes(most.inputs, most.outputs, each);
        weights_ = std::clamp<std::size_t>(kRotatedBytes / weight_bytes_, 1, 8);
        return driver_.create_stream(&stream_, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS
               && fill(x_, bytes(most.rows, most.inputs, each)) && fill(weight_, weights_ * weight_bytes_)
               && fill(bias_, bytes(1, most.outputs, 2)) && fill(y_, bytes(most.rows, most.outputs, 2))
               && scale_.allocate(driver_, bytes(1, most.outputs, 4)).ok() && scale_.fill(kOne).ok()
               && workspace_.allocate(driver_, kWorkspaceLimit).ok();
    }

    // The fastest of the library's proposals, or nothing where they could not be measured.
    std::optional<cublasLtMatmulAlgo_t> fastest(LinearProblem const& problem) {
        std::vector<cublasLtMatmulHeuristicResult_t> proposals;
        std::vector<Launches> launches;
        if (!record_all(problem, proposals, launches)) {
            return std::nullopt;
        }
        std::vector<std::size_t> order;
        for (std::size_t i = 0; i < 2 * launches.size(); ++i) {
            order.push_back(i % launches.size());
        }
        std::vector<float> const begun = times(launches, order);  // all once to warm up, then all once more
        if (begun.empty()) {
            return std::nullopt;
        }
        // Each that is left follows the library's favourite: a GPU changes its clocks meanwhile.
        float const* const second = begun.data() + launches.size();
        order.clear();
        for (std::size_t i = 1; i < launches.size(); ++i) {
            for (std::size_t round = 0; round < kRounds && second[i] < second[0] * kHopeless; ++round) {
                order.insert(order.end(), {0, i});
            }
        }
        std::vector<float> const compared = times(launches, order);
        std::size_t best = 0;
        float least = worthwhile(problem.shape);
        for (std::size_t at = 0; at + 2 * kRounds <= compared.size(); at += 2 * kRounds) {
            std::array<float, kRounds> ratios{};
            for (std::size_t round = 0; round < kRounds; ++round) {
                ratios[round] = compared[at + 2 * round + 1] / compared[at + 2 * round];
            }
            std::nth_element(ratios.begin(), ratios.begin() + kRounds / 2, ratios.end());
            if (ratios[kRounds / 2] < least) {
                least = ratios[kRounds / 2];
                best = order[at + 1];
            }
        }
        return proposals[best].algo;
    }

private:
    bool record_all(LinearProblem const& problem, std::vector<cublasLtMatmulHeuristicResult_t>& proposals,
        std::vector<Launches>& launches) {
        Matmul matmul;
        if (!matmul.make(driver_, library_, handle_, problem, nullptr).ok()
            || !matmul.propose(kProposals, proposals).ok()) {
            return false;
        }
        std::size_t const count = operations_of(problem.shape) > 1e11 ? 2 : 12;
        for (auto const& proposal : proposals) {
            matmul.use(proposal.algo, proposal.workspaceSize);
            bool const recorded = launches.emplace_back(driver_).record(stream_, [&] {
                bool ok = true;
                for (std::size_t i = 0; ok && i < count; ++i) {
                    auto const weight = weight_.address() + i % weights_ * weight_bytes_;
                    LinearPointers const pointers{reinterpret_cast<void*>(x_.address()),
                        reinterpret_cast<void*>(weight), reinterpret_cast<void*>(bias_.address()),
                        reinterpret_cast<void*>(y_.address()), reinterpret_cast<void*>(scale_.address())};
                    ok = matmul.launch(pointers, reinterpret_cast<void*>(workspace_.address()), stream_).ok();
                }
                return ok;
            });
            if (!recorded) {
                return false;
            }
        }
        return true;
    }

    // Milliseconds of each, one right behind the other; the host waits only once, since a wait is long where
    // other processes use the GPU. Nothing where something fails.
    std::vector<float> times(std::vector<Launches> const& launches, std::vector<std::size_t> const& order) {
        while (events_.size() <= order.size()) {
            CUevent event = nullptr;
            if (driver_.create_event(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
                return {};
            }
            events_.push_back(event);
        }
        bool ok = driver_.record_event(events_[0], stream_) == CUDA_SUCCESS;
        for (std::size_t i = 0; ok && i < order.size(); ++i) {
            ok = launches[order[i]].launch(stream_)
                 && driver_.record_event(events_[i + 1], stream_) == CUDA_SUCCESS;
        }
        ok = driver_.synchronize(stream_) == CUDA_SUCCESS && ok;
        std::vector<float> all(order.size());
        for (std::size_t i = 0; ok && i < all.size(); ++i) {
            ok = driver_.elapsed(&all[i], events_[i], events_[i + 1]) == CUDA_SUCCESS && all[i] > 0.0F;
        }
        return ok ? all : std::vector<float>();
    }

    // Numbers between 1 and 2 in FP16, and in FP8, of either sign: with zeros a GPU takes less power, and runs
    // faster.
    bool fill(DeviceMemory& memory, std::size_t bytes) {
        std::vector<uint16_t> numbers(std::min<std::size_t>(bytes, std::size_t{1} << 20) / 2);
        uint32_t state = 1;
        for (uint16_t& number : numbers) {
            state = state * 1664525U + 1013904223U;
            number = static_cast<uint16_t>((state >> 16U & 0x8383U) | 0x3c38U);
        }
        std::size_t done = numbers.size() * 2;
        if (!memory.allocate(driver_, bytes).ok()
            || driver_.copy_from_host(memory.address(), numbers.data(), done) != CUDA_SUCCESS) {
            return false;
        }
        for (; done < bytes; done *= 2) {
            std::size_t const more = std::min(done, bytes - done);
            if (driver_.copy_async(memory.address() + done, memory.address(), more, stream_)
                != CUDA_SUCCESS) {
                return false;
            }
        }
        return driver_.synchronize(stream_) == CUDA_SUCCESS;
    }

    Driver const& driver_;
    CublasLt const& library_;
    cublasLtHandle_t handle_;
    CUstream stream_ = nullptr;
    std::vector<CUevent> events_;
    std::size_t weight_bytes_ = 0;
    std::size_t weights_ = 1;
    DeviceMemory x_, weight_, bias_, scale_, y_, workspace_;
};

// What was measured. Layers of one model have the same sizes, so it is kept for the process; and for others
// of the same machine where MHA_DEPLOY_GEMM_CACHE names a file.
class Measured {
public:
    // Machine, rows, inputs, outputs, type, bias, transposed and quantized.
    using Key = std::array<uint64_t, 7>;

    static Key key_of(uint64_t machine, LinearProblem const& problem) {
        auto const [rows, inputs, outputs] = problem.shape;
        return {machine, static_cast<uint64_t>(rows), static_cast<uint64_t>(inputs),
            static_cast<uint64_t>(outputs), static_cast<uint64_t>(problem.type), problem.parameters.has_bias,
            (problem.parameters.transposed ? 1U : 0U) + 2 * static_cast<uint64_t>(problem.parameters.quantized)};
    }

    // Null where it was not measured; nothing where it was left to cuBLASLt.
    std::optional<cublasLtMatmulAlgo_t> const* find(Key const& key) {
        auto found = all_.find(key);
        if (found == all_.end()) {
            read_file();
            found = all_.find(key);
        }
        return found == all_.end() ? nullptr : &found->second;
    }

    std::optional<cublasLtMatmulAlgo_t> const& add(
        Key const& key, std::optional<cublasLtMatmulAlgo_t> const& algorithm) {
        if (algorithm.has_value()) {
            append_to_file(key, *algorithm);
        }
        return all_[key] = algorithm;
    }

    std::mutex mutex;

private:
    struct Line {
        Key key;
        cublasLtMatmulAlgo_t algorithm;
        uint64_t checksum;

        uint64_t sum() const noexcept {
            return blob::checksum(reinterpret_cast<std::byte const*>(this), offsetof(Line, checksum));
        }
    };
    static_assert(sizeof(Line) == 128, "a line is written at once, and has no gaps");

    static std::FILE* open_file(char const* mode) {
        char const* const path = std::getenv("MHA_DEPLOY_GEMM_CACHE");
        return path == nullptr || *path == '\0' ? nullptr : std::fopen(path, mode);
    }
    void read_file() {
        if (std::FILE* const file = open_file("rb")) {
            Line line{};
            std::fseek(file, read_, SEEK_SET);
            while (std::fread(&line, sizeof(line), 1, file) == 1) {
                read_ += static_cast<long>(sizeof(line));
                if (line.checksum == line.sum()) {
                    all_.emplace(line.key, line.algorithm);
                }
            }
            std::fclose(file);
        }
    }
    static void append_to_file(Key const& key, cublasLtMatmulAlgo_t const& algorithm) {
        if (std::FILE* const file = open_file("ab")) {
            Line line{key, algorithm, 0};
            line.checksum = line.sum();
            std::fwrite(&line, sizeof(line), 1, file);
            std::fclose(file);
        }
    }

    std::map<Key, std::optional<cublasLtMatmulAlgo_t>> all_;
    long read_ = 0;  // bytes of the file
};

Measured& shared_measurements() {
    static Measured& measured = *new Measured;
    return measured;
}

std::vector<int64_t> measured_rows(int64_t most) {
    std::vector<int64_t> rows{most};
    for (int64_t power = 1; power <= most; power *= 2) {
        for (int64_t const each : {power, power * 3 / 4}) {
            if (each < most && (each == power || power >= 8)) {
                rows.push_back(each);
            }
        }
    }
    std::sort(rows.rbegin(), rows.rend());  // the largest first: they must not be cut off by the time limit
    return rows;
}

}  // namespace

bool LinearShape::operator==(LinearShape const& other) const noexcept {
    return rows == other.rows && inputs == other.inputs && outputs == other.outputs;
}

bool LinearProblem::operator==(LinearProblem const& other) const noexcept {
    return shape == other.shape && type == other.type && parameters.has_bias == other.parameters.has_bias
           && parameters.transposed == other.parameters.transposed
           && parameters.quantized == other.parameters.quantized && alignment == other.alignment;
}

std::string LinearProblem::text() const {
    return matrix(shape.rows, shape.inputs) + " x " + matrix(shape.inputs, shape.outputs) + " in "
           + (parameters.in_fp8() ? "FP8 to " : "") + (type == Type::kHalf ? "FP16" : "BF16")
           + (parameters.quantized == Quantized::kPerOutput ? " with a scale for each output" : "")
           + (parameters.has_bias ? " with bias" : " without bias")
           + (parameters.transposed ? ", weight transposed" : "");
}

Status LinearParameters::check() const {
    if (quantized < Quantized::kNone || quantized > Quantized::kLast) {
        return Status::failed("quantized must be 0 to 2, got " + std::to_string(static_cast<int32_t>(quantized)));
    }
    if (in_fp8() && !transposed) {
        return Status::failed("a GEMM in FP8 reads the weight as [N, K]; got transposed = 0; transpose it");
    }
    return Status();
}

namespace {

// What measuring and proposing need of a GPU, or none where there is none.
struct Opened {
    Driver const* driver = nullptr;
    std::shared_ptr<Handles> handles;
    CublasLt const* library = nullptr;
    cublasLtHandle_t handle = nullptr;

    bool open() {
        Context context;
        return load_driver(driver).ok() && current_context(*driver, context).ok()
               && Handles::open(*driver, context, handles).ok() && handles->cublas_lt(library, handle).ok();
    }
};

// Where every algorithm takes about as long as its launch, there is nothing to choose.
bool is_small(LinearShape const& shape) {
    return shape.rows < 1
           || 2 * (shape.rows * (shape.inputs + shape.outputs) + shape.inputs * shape.outputs) < kSmallBytes;
}

template <typename Entry>
auto find_in(std::vector<Entry>& entries, LinearShape const& shape, Type type) {
    return std::find_if(entries.begin(), entries.end(),
        [&](Entry const& each) { return each.shape == shape && each.type == type; });
}

}  // namespace

void LinearTuning::begin_on(uint64_t machine) {
    if (machine != record_.machine) {
        record_ = Record{machine, {}, {}};
    }
}

void LinearTuning::measure(LinearParameters const& parameters, LinearShape const& most, Type type) {
    Opened opened_here;
    if (is_small(most) || !opened_here.open()) {
        return;  // cuBLASLt's own choice will do
    }
    auto const& [driver, handles, library, handle] = opened_here;
    OutsideCapture const outside(*driver);
    std::lock_guard<std::mutex> const lock(mutex_);
    uint64_t const here = machine_of(*driver, *library);
    begin_on(here);
    Measured& measured = shared_measurements();
    std::lock_guard<std::mutex> const one_at_a_time(measured.mutex);
    auto const begin = std::chrono::steady_clock::now();
    Bench bench(*driver, *library, handle);
    std::optional<bool> opened;
    for (int64_t const rows : measured_rows(most.rows)) {
        LinearProblem const problem{{rows, most.inputs, most.outputs}, type, parameters, kFullAlignment};
        auto const tactics = find_in(record_.tactics, problem.shape, type);
        if (find_in(record_.choices, problem.shape, type) != record_.choices.end()
            || (tactics != record_.tactics.end() && tactics->offered)) {
            continue;
        }
        Measured::Key const key = Measured::key_of(here, problem);
        std::optional<cublasLtMatmulAlgo_t> const* known = measured.find(key);
        if (known == nullptr) {
            // What does not fit into the time is left to cuBLASLt, and not tried again for the next layer.
            std::chrono::duration<double> const spent = std::chrono::steady_clock::now() - begin;
            opened = opened.has_value() ? opened : bench.open(most, parameters.in_fp8());
            bool const in_time = *opened && spent.count() < kMeasuringSeconds;
            known = &measured.add(key, in_time ? bench.fastest(problem) : std::nullopt);
        }
        if (known->has_value()) {
            record_.choices.push_back({problem.shape, type, **known});
        }
    }
}

int32_t LinearTuning::propose(LinearParameters const& parameters, LinearShape const& shape, Type type) {
    Opened opened;
    if (is_small(shape) || !opened.open()) {
        return 0;
    }
    OutsideCapture const outside(*opened.driver);
    std::lock_guard<std::mutex> const lock(mutex_);
    begin_on(machine_of(*opened.driver, *opened.library));
    auto known = find_in(record_.tactics, shape, type);
    if (known == record_.tactics.end()) {
        LinearProblem const problem{shape, type, parameters, kFullAlignment};
        std::vector<cublasLtMatmulHeuristicResult_t> proposals;
        Matmul matmul;
        if (!matmul.make(*opened.driver, *opened.library, opened.handle, problem, nullptr).ok()
            || !matmul.propose(kProposals, proposals).ok() || proposals.size() < 2) {
            return 0;
        }
        Tactics made{shape, type, {}, false};
        for (auto const& proposal : proposals) {
            made.algorithms.push_back(proposal.algo);
        }
        known = record_.tactics.insert(record_.tactics.end(), std::move(made));
    }
    return static_cast<int32_t>(known->algorithms.size());
}

void LinearTuning::offer(LinearShape const& shape, Type type) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (auto const known = find_in(record_.tactics, shape, type); known != record_.tactics.end()) {
        known->offered = true;
    }
}

std::optional<cublasLtMatmulAlgo_t> LinearTuning::find(
    uint64_t machine, LinearShape const& shape, Type type, int32_t tactic) const {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (machine != record_.machine) {
        return std::nullopt;
    }
    for (Tactics const& each : record_.tactics) {
        if (tactic > 0 && each.shape == shape && each.type == type
            && static_cast<std::size_t>(tactic) <= each.algorithms.size()) {
            return each.algorithms[static_cast<std::size_t>(tactic) - 1];
        }
    }
    for (Choice const& each : record_.choices) {
        if (each.shape == shape && each.type == type) {
            return each.algorithm;
        }
    }
    return std::nullopt;
}

LinearTuning::Record LinearTuning::record() const {
    std::lock_guard<std::mutex> const lock(mutex_);
    Record kept = record_;
    kept.tactics.erase(std::remove_if(kept.tactics.begin(), kept.tactics.end(),
                           [](Tactics const& each) { return !each.offered; }),
        kept.tactics.end());
    return kept;
}

std::string timing_key(LinearParameters const& parameters) {
    Opened opened;
    if (!opened.open()) {
        return "";
    }
    return "mha_deploy_linear_" + std::to_string(parameters.has_bias ? 1 : 0)
           + std::to_string(parameters.transposed ? 1 : 0)
           + std::to_string(static_cast<int32_t>(parameters.quantized)) + "_"
           + std::to_string(machine_of(*opened.driver, *opened.library));
}

namespace {

void add_place(BlobWriter& writer, LinearShape const& shape, Type type) {
    writer.add(shape.rows);
    writer.add(shape.inputs);
    writer.add(shape.outputs);
    writer.add(static_cast<int32_t>(type));
}

void take_place(BlobReader& reader, LinearShape& shape, Type& type) {
    int32_t number = 0;
    reader.take(shape.rows);
    reader.take(shape.inputs);
    reader.take(shape.outputs);
    reader.take(number);
    type = static_cast<Type>(number);
}

void add_algorithm(BlobWriter& writer, cublasLtMatmulAlgo_t const& algorithm) {
    for (uint64_t const word : algorithm.data) {
        writer.add(word);
    }
}

void take_algorithm(BlobReader& reader, cublasLtMatmulAlgo_t& algorithm) {
    for (uint64_t& word : algorithm.data) {
        reader.take(word);
    }
}

}  // namespace

std::vector<std::byte> serialize(LinearParameters const& parameters, LinearTuning::Record const& tuning) {
    BlobWriter writer(kMagic, kVersion);
    writer.add(parameters.has_bias);
    writer.add(parameters.transposed);
    writer.add(parameters.quantized);
    writer.add(tuning.machine);
    writer.add(static_cast<uint32_t>(tuning.choices.size()));
    for (LinearTuning::Choice const& choice : tuning.choices) {
        add_place(writer, choice.shape, choice.type);
        add_algorithm(writer, choice.algorithm);
    }
    writer.add(static_cast<uint32_t>(tuning.tactics.size()));
    for (LinearTuning::Tactics const& tactics : tuning.tactics) {
        add_place(writer, tactics.shape, tactics.type);
        writer.add(static_cast<uint32_t>(tactics.algorithms.size()));
        for (cublasLtMatmulAlgo_t const& algorithm : tactics.algorithms) {
            add_algorithm(writer, algorithm);
        }
    }
    return writer.finish();
}

Status deserialize(
    void const* bytes, std::size_t size, LinearParameters& parameters, LinearTuning::Record& tuning) {
    BlobReader reader;
    RETURN_IF_FAILED(reader.open(bytes, size, kMagic, kVersion, "linear"));
    uint32_t count = 0;
    reader.take(parameters.has_bias);
    reader.take(parameters.transposed);
    reader.take(parameters.quantized);
    reader.take(tuning.machine);
    reader.take(count);
    std::size_t const most = size / sizeof(cublasLtMatmulAlgo_t);  // of damaged numbers
    tuning.choices.resize(std::min<std::size_t>(count, most));
    for (LinearTuning::Choice& choice : tuning.choices) {
        take_place(reader, choice.shape, choice.type);
        take_algorithm(reader, choice.algorithm);
    }
    reader.take(count = 0);
    tuning.tactics.resize(std::min<std::size_t>(count, most));
    for (LinearTuning::Tactics& tactics : tuning.tactics) {
        take_place(reader, tactics.shape, tactics.type);
        reader.take(count = 0);
        tactics.algorithms.resize(std::min<std::size_t>(count, most));
        for (cublasLtMatmulAlgo_t& algorithm : tactics.algorithms) {
            take_algorithm(reader, algorithm);
        }
        tactics.offered = true;
    }
    RETURN_IF_FAILED(reader.finish());
    return parameters.check();
}

namespace {

struct Plan {
    Matmul matmul;
    DeviceMemory memory;  // where no workspace was given
    bool pinned = false;  // a graph was recorded that uses the memory
    int32_t tactic = 0;
};

Status check(LinearParameters const& parameters, LinearShape const& shape, Type type) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    auto const between = [](int64_t size, int64_t least) { return size >= least && size <= kMost; };
    if (!between(shape.rows, 0) || !between(shape.inputs, 1) || !between(shape.outputs, 1)) {
        return Status::failed("a projection has 0 to 2147483647 rows, 1 to as many inputs and outputs; got "
                              + std::to_string(shape.rows) + " rows, " + std::to_string(shape.inputs)
                              + " inputs, " + std::to_string(shape.outputs)
                              + " outputs; try other sizes of x and of the weight");
    }
    if (parameters.in_fp8() && (type != Type::kHalf || shape.inputs % kFp8Step != 0 || shape.outputs % kFp8Step != 0)) {
        return Status::failed("a GEMM in FP8 gives FP16 and has inputs and outputs that are multiples of 16; got "
                              + std::to_string(shape.inputs) + " inputs, " + std::to_string(shape.outputs)
                              + " outputs; leave this one in FP16");
    }
    if (type != Type::kHalf && type != Type::kBFloat16) {
        return Status::failed("a projection is in FP16 or BF16; got type "
                              + std::to_string(static_cast<int32_t>(type))
                              + "; try casting x, the weight and the bias");
    }
    return Status();
}

// The alignment in three steps, so that oddly placed tensors do not have a plan for every address.
Status alignment_of(LinearPointers const& pointers, LinearParameters const& parameters, uint32_t& alignment) {
    uintptr_t bits = 0;
    for (auto const& [name, address, used] :
        {std::tuple<char const*, void const*, bool>{"x", pointers.x, true},
            {"the weight", pointers.weight, true}, {"y", pointers.y, true},
            {"the bias", pointers.bias, parameters.has_bias},
            {"the scale", pointers.scale, parameters.in_fp8()}}) {
        if (used && address == nullptr) {
            return Status::failed(std::string("a projection got no address of ") + name
                                  + "; try setting the addresses of all inputs and outputs");
        }
        bits |= used ? reinterpret_cast<uintptr_t>(address) : 0;
    }
    for (uint32_t const step : {kFullAlignment, 16U, 2U}) {
        if (bits % step == 0 && (step > 2U || !parameters.in_fp8())) {
            alignment = step;
            return Status();
        }
    }
    return Status::failed("a projection got an odd address, or in FP8 one that is no multiple of 16; try tensors "
                          "aligned to 256 bytes");
}

}  // namespace

struct LinearWork::State {
    LinearParameters parameters;
    std::shared_ptr<LinearTuning const> tuning;
    Driver const* driver = nullptr;
    Context context;  // the one that the handle and the memory belong to
    std::shared_ptr<Handles> handles;
    CublasLt const* library = nullptr;
    cublasLtHandle_t handle = nullptr;
    std::list<Plan> plans;  // the last used first
    int32_t tactic = 0;

    // Once; later only a look at whether the context is still the same.
    Status open() {
        Context current;
        RETURN_IF_FAILED(current_context(*driver, current));
        if (handle != nullptr) {
            return current == context
                       ? Status()
                       : Status::failed("a projection was prepared in one CUDA context; got another one; "
                                        "try an execution context for each");
        }
        context = current;
        RETURN_IF_FAILED(Handles::open(*driver, context, handles));
        return handles->cublas_lt(library, handle);
    }

    Status find(LinearProblem const& problem, bool capturing, Plan*& plan) {
        RETURN_IF_FAILED(open());
        for (auto known = plans.begin(); known != plans.end(); ++known) {
            if (known->tactic == tactic && known->matmul.problem() == problem) {
                plans.splice(plans.begin(), plans, known);
                plan = &plans.front();
                return Status();
            }
        }
        if (!capturing) {  // freeing waits for the device, which is no business of a recording
            std::size_t kept = 0;
            for (auto each = plans.begin(); each != plans.end();) {
                bool const goes = !each->pinned && ++kept >= kPlans;
                each = goes ? plans.erase(each) : std::next(each);
            }
        }
        OutsideCapture const outside(*driver);
        std::optional<cublasLtMatmulAlgo_t> measured;
        if (problem.alignment == kFullAlignment) {
            measured = tuning->find(machine_of(*driver, *library), problem.shape, problem.type, tactic);
        }
        std::list<Plan> made(1);
        made.front().tactic = tactic;
        Status status = made.front().matmul.make(
            *driver, *library, handle, problem, measured.has_value() ? &*measured : nullptr);
        if (status.ok()) {
            plans.splice(plans.begin(), made);
            plan = &plans.front();
        }
        return status;
    }

    // `workspace` is the caller's on the way in, and the one to use on the way out.
    Status take_workspace(Plan& plan, bool capturing, void*& workspace, std::size_t given) const {
        plan.pinned = plan.pinned || (capturing && plan.matmul.has_memory());
        std::size_t const wanted = plan.matmul.workspace_bytes();
        bool const aligned = reinterpret_cast<uintptr_t>(workspace) % kFullAlignment == 0;
        if (wanted == 0 || (workspace != nullptr && given >= wanted && aligned)) {
            return Status();
        }
        if (plan.memory.address() == 0) {
            OutsideCapture const outside(*driver);
            RETURN_IF_FAILED(plan.memory.allocate(*driver, wanted));
        }
        plan.pinned = plan.pinned || capturing;
        workspace = reinterpret_cast<void*>(plan.memory.address());
        return Status();
    }
};

LinearWork::LinearWork(LinearParameters const& parameters, std::shared_ptr<LinearTuning const> tuning)
    : state_(new (std::nothrow) State) {
    if (state_ != nullptr) {
        state_->parameters = parameters;
        state_->tuning = std::move(tuning);
    }
}

LinearWork::~LinearWork() {
    release_in_context(state_);
}

void LinearWork::set_tactic(int32_t tactic) noexcept {
    if (state_ != nullptr) {
        state_->tactic = tactic;
    }
}

Status LinearWork::prepare(LinearShape const& shape, Type type) {
    return guarded("prepare a projection", [&]() -> Status {
        if (state_ == nullptr) {
            return Status::failed("out of memory");
        }
        if (Status status = check(state_->parameters, shape, type); !status.ok() || shape.rows == 0) {
            return status;
        }
        RETURN_IF_FAILED(load_driver(state_->driver));
        Plan* plan = nullptr;
        return state_->find({shape, type, state_->parameters, kFullAlignment}, false, plan);
    });
}

std::size_t LinearWork::workspace_bytes(LinearShape const& shape, Type type) {
    return shape.rows != 0 && prepare(shape, type).ok() ? kWorkspaceLimit : 0;
}

Status LinearWork::run(LinearShape const& shape, Type type, LinearPointers const& pointers, void* workspace,
    std::size_t workspace_bytes, CUstream stream) {
    return guarded("run a projection", [&]() -> Status {
        if (state_ == nullptr) {
            return Status::failed("out of memory");
        }
        if (Status status = check(state_->parameters, shape, type); !status.ok() || shape.rows == 0) {
            return status;
        }
        LinearProblem problem{shape, type, state_->parameters, kFullAlignment};
        RETURN_IF_FAILED(alignment_of(pointers, problem.parameters, problem.alignment));
        RETURN_IF_FAILED(load_driver(state_->driver));
        bool const capturing = is_capturing(*state_->driver, stream);
        Plan* plan = nullptr;
        RETURN_IF_FAILED(state_->find(problem, capturing, plan));
        RETURN_IF_FAILED(state_->take_workspace(*plan, capturing, workspace, workspace_bytes));
        return plan->matmul.launch(pointers, workspace, stream);
    });
}

}  // namespace mha_deploy
