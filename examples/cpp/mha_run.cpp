// Runs an engine of mha-deploy without Python: golden cases against the FP64 oracle, a decode loop with an
// in-place KV cache, and latency. TensorRT 8.6 to 11.
//
//   mha_run ENGINE [CASE.safetensors ...] [--decode TRACE.safetensors] [--plugin LIBRARY.so]
//           [--factor 16] [--runs 200]
//
// Exit codes: 0 all within budget, 1 a result is wrong, 2 bad input, 3 TensorRT or CUDA failed.

#include "golden.h"

#include <NvInfer.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <memory>

namespace {

using mha::Shape;
using mha::Tensor;
using mha::Tensors;

struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(cudaError_t code, char const* what) {
    if (code != cudaSuccess) throw DeviceError(std::string(what) + ": " + cudaGetErrorString(code));
}

void require(bool done, std::string const& what) {
    if (!done) throw DeviceError(what);
}

class Logger : public nvinfer1::ILogger {
    void log(Severity severity, char const* message) noexcept override {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", message);
    }
};

// -- Memory and time on the device ---------------------------------------------------------------------

class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t bytes) : mBytes{bytes} {
        check(cudaMalloc(&mAddress, std::max<size_t>(bytes, 1)), "cudaMalloc");
    }
    Buffer(Buffer&& other) noexcept
        : mAddress{std::exchange(other.mAddress, nullptr)}, mBytes{std::exchange(other.mBytes, 0)} {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(mAddress, other.mAddress);
        std::swap(mBytes, other.mBytes);
        return *this;
    }
    ~Buffer() { cudaFree(mAddress); }

    char* address() const { return static_cast<char*>(mAddress); }
    size_t bytes() const { return mBytes; }

    void upload(std::string const& data, cudaStream_t stream) const {
        check(cudaMemcpyAsync(mAddress, data.data(), data.size(), cudaMemcpyHostToDevice, stream), "upload");
    }
    std::string download(size_t bytes, cudaStream_t stream) const {
        std::string data(bytes, '\0');
        check(cudaMemcpyAsync(data.data(), mAddress, bytes, cudaMemcpyDeviceToHost, stream), "download");
        check(cudaStreamSynchronize(stream), "download");
        return data;
    }
    void fill(int byte, cudaStream_t stream) const {
        check(cudaMemsetAsync(mAddress, byte, mBytes, stream), "fill");
    }

private:
    void* mAddress{nullptr};
    size_t mBytes{0};
};

struct Stream {
    cudaStream_t handle{};
    Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
    ~Stream() { cudaStreamDestroy(handle); }
};

struct Event {
    cudaEvent_t handle{};
    Event() { check(cudaEventCreate(&handle), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(handle); }
};

// The time of one call, by the device's own clock.
template <typename Launch>
void printLatency(char const* what, int runs, cudaStream_t stream, Launch const& launch) {
    for (int i = 0; i < 20; ++i) launch();
    std::vector<std::unique_ptr<Event>> events;
    for (int i = 0; i <= runs; ++i) events.push_back(std::make_unique<Event>());
    check(cudaEventRecord(events[0]->handle, stream), "cudaEventRecord");
    for (int i = 0; i < runs; ++i) {
        launch();
        check(cudaEventRecord(events[i + 1]->handle, stream), "cudaEventRecord");
    }
    check(cudaStreamSynchronize(stream), what);
    std::vector<float> times(runs);
    for (int i = 0; i < runs; ++i)
        check(cudaEventElapsedTime(&times[i], events[i]->handle, events[i + 1]->handle),
              "cudaEventElapsedTime");
    std::sort(times.begin(), times.end());
    auto const percentile = [&](double share) {
        return 1e3 * times[static_cast<size_t>(share * (runs - 1))];
    };
    std::printf("%s: p50 %.1f us, p90 %.1f us, p99 %.1f us (%d calls)\n", what, percentile(0.5),
                percentile(0.9), percentile(0.99), runs);
}

// -- The engine ----------------------------------------------------------------------------------------

std::string typeName(nvinfer1::DataType type) {
    using nvinfer1::DataType;
    if (type == DataType::kFLOAT) return "F32";
    if (type == DataType::kHALF) return "F16";
    if (type == DataType::kINT32) return "I32";
    if (type == DataType::kBOOL) return "BOOL";
    if (type == DataType::kINT8) return "I8";
#if NV_TENSORRT_MAJOR >= 10
    if (type == DataType::kINT64) return "I64";
    if (type == DataType::kBF16) return "BF16";
#endif
    mha::fail("a tensor of the engine has a type that this program does not know");
}

Shape shapeOf(nvinfer1::Dims const& dims) {
    return {dims.d, dims.d + std::max(dims.nbDims, 0)};
}

nvinfer1::Dims dimsOf(Shape const& shape) {
    nvinfer1::Dims dims{};
    if (shape.size() > nvinfer1::Dims::MAX_DIMS) mha::fail("a tensor has too many dimensions");
    dims.nbDims = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i)
        dims.d[i] = static_cast<std::decay_t<decltype(dims.d[0])>>(shape[i]);
    return dims;
}

void loadPlugins(std::string const& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    require(library != nullptr, std::string("cannot load the plugin library: ") + (library ? "" : dlerror()));
    auto const enroll = reinterpret_cast<char const* (*)()>(dlsym(library, "mha_deploy_register_plugins"));
    require(enroll != nullptr, path + " is no plugin library of mha-deploy");
    char const* refusal = enroll();
    require(refusal == nullptr,
            std::string("TensorRT refuses the plugin library: ") + (refusal ? refusal : ""));
}

class Engine {
public:
    Engine(std::string const& path, std::string const& plugin) {
        if (!plugin.empty()) loadPlugins(plugin);
        std::string const plan = mha::readFile(path);
        mRuntime.reset(nvinfer1::createInferRuntime(mLogger));
        require(mRuntime != nullptr, "TensorRT cannot be started");
        mEngine.reset(mRuntime->deserializeCudaEngine(plan.data(), plan.size()));
        require(mEngine != nullptr,
                "TensorRT cannot load " + path + "; is it for this version and this GPU?");
        for (int32_t i = 0; i < mEngine->getNbIOTensors(); ++i) {
            std::string const name = mEngine->getIOTensorName(i);
            bool const isInput = mEngine->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kINPUT;
            (isInput ? inputs : outputs).push_back(name);
        }
        // An output that shares the memory of an input: there the engine writes only the new entries of a KV
        // cache.
        std::string const manifest = path.substr(0, path.rfind('.')) + ".json";
        if (std::ifstream(manifest).good()) {
            mha::Json const data = mha::JsonReader(mha::readFile(manifest)).read();
            if (mha::Json const* found = data.find("in_place"))
                for (auto const& [output, input] : found->members) inPlace[output] = input.text;
        }
#if NV_TENSORRT_MAJOR >= 11
        for (std::string const& name : outputs)
            if (char const* input = mEngine->getAliasedInputTensor(name.c_str())) inPlace[name] = input;
#endif
        mContexts.resize(static_cast<size_t>(mEngine->getNbOptimizationProfiles()));
    }

    std::string type(std::string const& name) const {
        return typeName(mEngine->getTensorDataType(name.c_str()));
    }
    bool has(std::string const& name) const {
        return std::count(inputs.begin(), inputs.end(), name) +
                   std::count(outputs.begin(), outputs.end(), name) >
               0;
    }

    // The largest size of a dimension in any profile.
    int64_t largest(std::string const& name, size_t axis) const {
        int64_t found = 0;
        for (int32_t p = 0; p < mEngine->getNbOptimizationProfiles(); ++p) {
            Shape const shape =
                shapeOf(mEngine->getProfileShape(name.c_str(), p, nvinfer1::OptProfileSelector::kMAX));
            if (axis < shape.size()) found = std::max(found, shape[axis]);
        }
        return found;
    }

    // A context whose profile takes these shapes, with the shapes set.
    nvinfer1::IExecutionContext& prepare(std::map<std::string, Shape> const& shapes, cudaStream_t stream) {
        for (size_t p = 0; p < mContexts.size(); ++p) {
            if (!admits(static_cast<int32_t>(p), shapes)) continue;
            if (!mContexts[p]) {
                mContexts[p].reset(mEngine->createExecutionContext());
                require(mContexts[p] != nullptr, "TensorRT cannot create an execution context");
                require(mContexts[p]->setOptimizationProfileAsync(static_cast<int32_t>(p), stream),
                        "the profile is refused");
            }
            for (auto const& [name, shape] : shapes)
                require(mContexts[p]->setInputShape(name.c_str(), dimsOf(shape)),
                        "the shape of " + name + " is refused");
            return *mContexts[p];
        }
        std::string found;
        for (auto const& [name, shape] : shapes) found += " " + name + mha::text(shape);
        mha::fail("no optimization profile takes" + found);
    }

    std::vector<std::string> inputs, outputs;
    std::map<std::string, std::string> inPlace;

private:
    bool admits(int32_t profile, std::map<std::string, Shape> const& shapes) const {
        for (auto const& [name, shape] : shapes) {
            using nvinfer1::OptProfileSelector;
            Shape const least =
                shapeOf(mEngine->getProfileShape(name.c_str(), profile, OptProfileSelector::kMIN));
            Shape const most =
                shapeOf(mEngine->getProfileShape(name.c_str(), profile, OptProfileSelector::kMAX));
            if (least.size() != shape.size()) return false;
            for (size_t i = 0; i < shape.size(); ++i)
                if (shape[i] < least[i] || shape[i] > most[i]) return false;
        }
        return true;
    }

    Logger mLogger;
    std::unique_ptr<nvinfer1::IRuntime> mRuntime;
    std::unique_ptr<nvinfer1::ICudaEngine> mEngine;
    std::vector<std::unique_ptr<nvinfer1::IExecutionContext>> mContexts;
};

// A tensor in the type that the engine takes: TensorRT before 10 has no INT64.
Tensor converted(Tensor const& given, std::string const& type, std::string const& name) {
    if (given.dtype == type) return given;
    if (given.dtype != "I64" || type != "I32")
        mha::fail(name + " is " + given.dtype + ", and the engine takes " + type);
    Tensor found{type, given.shape, {}};
    for (int64_t i = 0; i < given.count(); ++i) {
        auto const value = static_cast<int32_t>(given.at(i));
        found.data.append(reinterpret_cast<char const*>(&value), sizeof value);
    }
    return found;
}

size_t bytesOf(Shape const& shape, std::string const& type) {
    return static_cast<size_t>(mha::volume(shape)) * mha::itemSize(type);
}

// -- Golden cases --------------------------------------------------------------------------------------

struct Options {
    std::string engine, plugin, trace;
    std::vector<std::string> cases;
    double factor{16};
    int runs{200};
};

bool report(std::string const& what, mha::Verdict const& verdict) {
    std::printf("%s: relative L2 %.2e, max %.2e, %.0f%% of the budget: %s\n", what.c_str(),
                verdict.error.relativeL2, verdict.error.maxAbs, 100 * verdict.share,
                verdict.passed         ? "passed"
                : verdict.error.finite ? "WRONG"
                                       : "WRONG, not finite");
    return verdict.passed;
}

// The golden name of an output: an engine that returns only the new entries of a cache names them so.
std::string goldenName(std::string const& output) {
    if (output == "key_entries") return "key_cache_out";
    if (output == "value_entries") return "value_cache_out";
    return output;
}

bool runCase(Engine& engine, std::string const& path, Options const& options, Stream const& stream) {
    Tensors const golden = mha::readSafetensors(path);
    std::map<std::string, Shape> shapes;
    Tensors feeds;
    for (std::string const& name : engine.inputs) {
        auto const it = golden.find("inputs/" + name);
        if (it == golden.end()) mha::fail(path + " has no input " + name);
        feeds[name] = converted(it->second, engine.type(name), name);
        shapes[name] = it->second.shape;
    }
    nvinfer1::IExecutionContext& context = engine.prepare(shapes, stream.handle);
    std::map<std::string, Buffer> buffers;
    for (auto const& [name, tensor] : feeds) {
        buffers[name] = Buffer(tensor.data.size());
        buffers[name].upload(tensor.data, stream.handle);
        require(context.setTensorAddress(name.c_str(), buffers[name].address()),
                "the address of " + name + " is refused");
    }
    Tensors results;
    for (std::string const& name : engine.outputs) {
        Tensor& result = results[name];
        result.dtype = engine.type(name);
        result.shape = shapeOf(context.getTensorShape(name.c_str()));
        size_t const bytes = bytesOf(result.shape, result.dtype);
        auto const shared = engine.inPlace.find(name);
        Buffer const* place = nullptr;
        if (shared != engine.inPlace.end()) {
            place = &buffers.at(shared->second);
        } else {
            buffers[name] = Buffer(bytes);
            buffers[name].fill(0xff, stream.handle); // NaN: what nothing writes cannot pass
            place = &buffers[name];
        }
        require(context.setTensorAddress(name.c_str(), place->address()),
                "the address of " + name + " is refused");
    }
    require(context.enqueueV3(stream.handle), "the call failed");
    bool passed = true;
    size_t judged = 0;
    for (auto& [name, result] : results) {
        auto const shared = engine.inPlace.find(name);
        Buffer const& place = buffers.at(shared == engine.inPlace.end() ? name : shared->second);
        result.data = place.download(bytesOf(result.shape, result.dtype), stream.handle);
        auto const oracle = golden.find("oracle/" + goldenName(name)),
                   eager = golden.find("eager/" + goldenName(name));
        if (oracle == golden.end() || eager == golden.end()) continue;
        Tensor got = result;
        if (got.shape != oracle->second.shape &&
            got.shape.size() == 4) { // of a cache, the new entries are golden
            int64_t const S = oracle->second.shape.at(2);
            std::vector<int64_t> starts(static_cast<size_t>(got.shape[0]), got.shape[2] - S);
            auto const lengths = golden.find("inputs/lengths");
            if (lengths != golden.end())
                for (size_t b = 0; b < starts.size(); ++b)
                    starts[b] = static_cast<int64_t>(lengths->second.at(b));
            got = mha::entriesFrom(got, starts, S);
        }
        passed &= report(path + " " + name, mha::judge(got, oracle->second, eager->second, options.factor));
        ++judged;
    }
    if (!judged) mha::fail(path + " has no golden result of this engine");
    printLatency((path + " latency").c_str(), options.runs, stream.handle,
                 [&] { require(context.enqueueV3(stream.handle), "the call failed"); });
    return passed;
}

// -- The decode loop: a preallocated KV cache on the device --------------------------------------------

class DecodeLoop {
public:
    DecodeLoop(Engine& engine, Stream const& stream, int64_t B) : mEngine{engine}, mStream{stream}, mB{B} {
        for (std::string const name : {"x", "key_cache", "value_cache", "lengths", "output"})
            if (!engine.has(name))
                mha::fail("the engine has no " + name + ": it is no layer with a preallocated KV cache");
        mReturnsEntries = engine.has("key_entries");
        mType = engine.type("key_cache");
        mShape = {B, engine.largest("key_cache", 1), engine.largest("key_cache", 2),
                  engine.largest("key_cache", 3)};
        E = engine.largest("x", 2);
        most = engine.largest("x", 1);
        for (int i = 0; i < 2; ++i) {
            size_t const bytes = bytesOf(mShape, mType);
            mCaches[i] = Buffer(bytes);
            mCaches[i].fill(0, stream.handle);
            bool const shared = engine.inPlace.count(kOut[i]) > 0;
            if (!mReturnsEntries && !shared) mSpare[i] = Buffer(bytes);
        }
        mLengthsOnDevice = Buffer(static_cast<size_t>(B) * sizeof(int32_t));
        lengths.assign(static_cast<size_t>(B), 0);
    }

    // S new tokens of every batch element, [B, S, E]; the lengths advance by the counts of real ones.
    Tensor feed(Tensor const& x, std::vector<int64_t> const& counts) {
        int64_t const S = x.shape.at(1);
        launch(prepare(S, x.data), S);
        Tensor found{mEngine.type("output"), {mB, S, E}, {}};
        found.data = mOutput.download(bytesOf(found.shape, found.dtype), mStream.handle);
        for (size_t b = 0; b < lengths.size(); ++b) lengths[b] += counts[b];
        return found;
    }

    void time(int runs) {
        nvinfer1::IExecutionContext& context =
            prepare(1, std::string(bytesOf({mB, 1, E}, mEngine.type("x")), '\0'));
        printLatency("decode step latency", runs, mStream.handle, [&] { launch(context, 1); });
    }

    Tensor cache(int which) const {
        return {mType, mShape, mCaches[which].download(bytesOf(mShape, mType), mStream.handle)};
    }

    std::vector<int64_t> lengths;
    int64_t E{0}, most{0};

private:
    nvinfer1::IExecutionContext& prepare(int64_t S, std::string const& x) {
        for (int64_t const length : lengths)
            if (length + S > mShape[2]) mha::fail("the new tokens do not fit into the KV cache");
        std::string places;
        for (int64_t const length : lengths) {
            auto const value = static_cast<int32_t>(length);
            places.append(reinterpret_cast<char const*>(&value), sizeof value);
        }
        mLengthsOnDevice.upload(places, mStream.handle);
        if (mX.bytes() < x.size()) mX = Buffer(x.size());
        mX.upload(x, mStream.handle);
        size_t const bytes = bytesOf({mB, S, E}, mEngine.type("output"));
        if (mOutput.bytes() < bytes) mOutput = Buffer(bytes);
        mOutput.fill(0xff, mStream.handle);
        check(cudaStreamSynchronize(mStream.handle), "upload"); // the host's copies end with this function
        return mEngine.prepare(
            {{"x", {mB, S, E}}, {"key_cache", mShape}, {"value_cache", mShape}, {"lengths", {mB}}},
            mStream.handle);
    }

    void launch(nvinfer1::IExecutionContext& context, int64_t S) {
        auto const bind = [&](char const* name, Buffer const& buffer) {
            require(context.setTensorAddress(name, buffer.address()),
                    std::string("the address of ") + name + " is refused");
        };
        bind("x", mX);
        bind("lengths", mLengthsOnDevice);
        bind("output", mOutput);
        Shape const fresh{mB, mShape[1], S, mShape[3]};
        for (int i = 0; i < 2; ++i) {
            bind(kIn[i], mCaches[i]);
            if (mReturnsEntries) {
                if (mEntries[i].bytes() < bytesOf(fresh, mType)) mEntries[i] = Buffer(bytesOf(fresh, mType));
                bind(kNew[i], mEntries[i]);
            } else {
                bind(kOut[i], mSpare[i].bytes() ? mSpare[i] : mCaches[i]);
            }
        }
        require(context.enqueueV3(mStream.handle), "the decode step failed");
        for (int i = 0; i < 2; ++i) {
            if (mReturnsEntries) copyEntries(i, S);
            if (mSpare[i].bytes()) std::swap(mCaches[i], mSpare[i]);
        }
    }

    // The new entries of every head to the place behind its valid ones.
    void copyEntries(int which, int64_t S) {
        size_t const entry = bytesOf({mShape[3]}, mType), heads = static_cast<size_t>(mShape[1]);
        size_t const pitch = static_cast<size_t>(mShape[2]) * entry, width = static_cast<size_t>(S) * entry;
        for (size_t b = 0; b < lengths.size(); ++b)
            check(cudaMemcpy2DAsync(mCaches[which].address() + b * heads * pitch +
                                        static_cast<size_t>(lengths[b]) * entry,
                                    pitch, mEntries[which].address() + b * heads * width, width, width, heads,
                                    cudaMemcpyDeviceToDevice, mStream.handle),
                  "copying new entries");
    }

    static constexpr char const* kIn[]{"key_cache", "value_cache"};
    static constexpr char const* kOut[]{"key_cache_out", "value_cache_out"};
    static constexpr char const* kNew[]{"key_entries", "value_entries"};

    Engine& mEngine;
    Stream const& mStream;
    int64_t mB;
    bool mReturnsEntries{false};
    std::string mType;
    Shape mShape;
    Buffer mCaches[2], mSpare[2], mEntries[2], mX, mOutput, mLengthsOnDevice;
};

// The tokens at these positions of every batch element: [B, L, E] -> [B, n, E].
Tensor tokensAt(Tensor const& all, std::vector<std::vector<int64_t>> const& positions) {
    int64_t const L = all.shape.at(1), E = all.shape.at(2);
    size_t const token = static_cast<size_t>(E) * mha::itemSize(all.dtype);
    Tensor found{all.dtype, {all.shape[0], static_cast<int64_t>(positions.at(0).size()), E}, {}};
    for (size_t b = 0; b < positions.size(); ++b)
        for (int64_t const position : positions[b]) {
            if (position < 0 || position >= L) mha::fail("the trace has too few tokens");
            found.data.append(all.data, (b * static_cast<size_t>(L) + static_cast<size_t>(position)) * token,
                              token);
        }
    return found;
}

bool decode(Engine& engine, Options const& options, Stream const& stream) {
    Tensors const trace = mha::readSafetensors(options.trace);
    auto const part = [&](std::string const& name) -> Tensor const& {
        auto const it = trace.find(name);
        if (it == trace.end()) mha::fail(options.trace + " has no " + name);
        return it->second;
    };
    Tensor const &x = part("inputs/tokens/x"), &oracle = part("oracle/output"), &eager = part("eager/output");
    auto const steps = static_cast<int64_t>(part("inputs/steps").at(0));
    std::vector<int64_t> prompt;
    for (int64_t b = 0; b < part("inputs/prompt").count(); ++b)
        prompt.push_back(static_cast<int64_t>(part("inputs/prompt").at(b)));
    size_t const B = prompt.size();
    if (!B || steps < 1 || x.shape.size() != 3 || x.shape[0] != static_cast<int64_t>(B))
        mha::fail(options.trace + " is no trace");
    int64_t const longest = *std::max_element(prompt.begin(), prompt.end());
    DecodeLoop loop(engine, stream, static_cast<int64_t>(B));
    bool passed = true;

    // The prompts, padded on the right with tokens from behind the last one of each.
    for (int64_t start = 0; start < longest; start += loop.most) {
        int64_t const stop = std::min(longest, start + loop.most);
        std::vector<std::vector<int64_t>> positions(B), whole(B);
        std::vector<int64_t> counts(B);
        for (size_t b = 0; b < B; ++b) {
            for (int64_t p = start; p < stop; ++p) positions[b].push_back(p < prompt[b] ? p : p + steps);
            counts[b] = std::clamp<int64_t>(prompt[b] - start, 0, stop - start);
        }
        Tensor got = loop.feed(tokensAt(x, positions), counts);
        Tensor want = tokensAt(oracle, positions), own = tokensAt(eager, positions);
        for (size_t b = 0; b < B; ++b) // results at padding are not defined
            for (Tensor* each : {&got, &want, &own}) {
                size_t const token = static_cast<size_t>(each->shape[2]) * mha::itemSize(each->dtype);
                size_t const row = token * static_cast<size_t>(each->shape[1]),
                             real = token * static_cast<size_t>(counts[b]);
                std::fill_n(each->data.begin() + static_cast<std::ptrdiff_t>(b * row + real), row - real,
                            '\0');
            }
        passed &= report("prefill of tokens " + std::to_string(start) + " to " + std::to_string(stop),
                         mha::judge(got, want, own, options.factor));
    }

    std::vector<std::vector<int64_t>> all(B);
    std::vector<Tensor> outputs;
    std::vector<int64_t> const one(B, 1);
    double worst = 0;
    int64_t worstStep = 0;
    for (int64_t step = 0; step < steps; ++step) {
        std::vector<std::vector<int64_t>> positions(B);
        for (size_t b = 0; b < B; ++b) {
            positions[b] = {prompt[b] + step};
            all[b].push_back(prompt[b] + step);
        }
        outputs.push_back(loop.feed(tokensAt(x, positions), one));
        double const error = mha::measure(outputs.back(), tokensAt(oracle, positions)).relativeL2;
        if (!(error <= worst)) {
            worst = error;
            worstStep = step + 1;
        }
    }
    Tensor got{outputs[0].dtype, {static_cast<int64_t>(B), steps, loop.E}, {}};
    size_t const token = static_cast<size_t>(loop.E) * mha::itemSize(got.dtype);
    for (size_t b = 0; b < B; ++b)
        for (Tensor const& each : outputs) got.data.append(each.data, b * token, token);
    passed &= report(std::to_string(steps) + " decode steps",
                     mha::judge(got, tokensAt(oracle, all), tokensAt(eager, all), options.factor));
    std::printf("worst decode step: %lld, relative L2 %.2e\n", static_cast<long long>(worstStep), worst);

    char const* const names[]{"key", "value"};
    for (int i = 0; i < 2; ++i) { // the whole sequence of every batch element is in the cache now
        for (size_t b = 0; b < B; ++b) {
            auto const cut = [b](Tensor const& cache, int64_t length) {
                Tensor one{cache.dtype, {1, cache.shape[1], cache.shape[2], cache.shape[3]}, {}};
                size_t const bytes = bytesOf(one.shape, one.dtype);
                one.data = cache.data.substr(b * bytes, bytes);
                return mha::entriesFrom(one, {0}, length);
            };
            std::string const name = names[i];
            mha::Verdict const verdict =
                mha::judge(cut(loop.cache(i), loop.lengths[b]), cut(part("oracle/" + name), loop.lengths[b]),
                           cut(part("eager/" + name), loop.lengths[b]), options.factor);
            passed &= report(name + " cache of batch element " + std::to_string(b), verdict);
        }
    }
    for (int64_t& length : loop.lengths) --length; // the last step, over and over
    loop.time(options.runs);
    return passed;
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        std::string const word = argv[i];
        auto const value = [&]() -> std::string {
            if (++i >= argc) mha::fail(word + " needs a value");
            return argv[i];
        };
        if (word == "--plugin")
            options.plugin = value();
        else if (word == "--decode")
            options.trace = value();
        else if (word == "--factor")
            options.factor = std::stod(value());
        else if (word == "--runs")
            options.runs = std::max(1, std::stoi(value()));
        else if (word.rfind("--", 0) == 0)
            mha::fail("no such option: " + word);
        else if (options.engine.empty())
            options.engine = word;
        else
            options.cases.push_back(word);
    }
    if (options.engine.empty() || (options.cases.empty() && options.trace.empty()))
        mha::fail(
            "usage: mha_run ENGINE [CASE.safetensors ...] [--decode TRACE.safetensors] [--plugin LIBRARY.so] "
            "[--factor 16] [--runs 200]");
    return options;
}

} // namespace

int main(int argc, char** argv) {
    try {
        Options const options = parse(argc, argv);
        Stream const stream;
        Engine engine(options.engine, options.plugin);
        bool passed = true;
        for (std::string const& path : options.cases) passed &= runCase(engine, path, options, stream);
        if (!options.trace.empty()) passed &= decode(engine, options, stream);
        std::printf("%s\n", passed ? "PASSED" : "FAILED");
        return passed ? 0 : 1;
    } catch (DeviceError const& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 3;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
