# Device code: compiled by nvcc to a fat binary, and put into the library as bytes. CMake's own CUDA language
# is not used: it wants a host compiler for the target, and nothing here runs on the host.

function(find_nvcc variable)
    if(NOT ${variable})
        find_program(${variable} nvcc PATHS /usr/local/cuda/bin DOC "The CUDA compiler")
    endif()
    if(NOT ${variable})
        message(FATAL_ERROR "nvcc, the CUDA compiler, is not there (looked in PATH and /usr/local/cuda/bin). "
            "Give it: -D${variable}=/path/to/nvcc")
    endif()
    set(${variable} ${${variable}} PARENT_SCOPE)
endfunction()

# The architectures that were asked for; without a wish, those of the usual ones that this nvcc knows.
function(choose_architectures variable nvcc)
    execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE listed RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "${nvcc} --list-gpu-arch failed (${failed}). "
            "Give a CUDA compiler that runs: -DNVCC=/path/to/nvcc")
    endif()
    string(REGEX MATCHALL "[0-9]+" known "${listed}")
    set(chosen)
    if(${variable})
        foreach(architecture ${${variable}})
            if(NOT architecture IN_LIST known)
                string(REPLACE ";" " " known_text "${known}")
                message(FATAL_ERROR "${nvcc} has no architecture ${architecture} (it has: ${known_text}). "
                    "Give others, -D${variable}='80;90', or a newer compiler, -DNVCC=/path/to/nvcc")
            endif()
        endforeach()
        set(chosen ${${variable}})
    else()
        foreach(architecture 80 86 89 90 100 120)
            if(architecture IN_LIST known)
                list(APPEND chosen ${architecture})
            endif()
        endforeach()
    endif()
    list(SORT chosen COMPARE NATURAL)
    set(${variable} "${chosen}" PARENT_SCOPE)
endfunction()

# Machine code for every architecture, and PTX of the newest for GPUs that do not exist yet.
function(code_options result)
    set(options)
    foreach(architecture ${CUDA_ARCHITECTURES})
        list(APPEND options -gencode arch=compute_${architecture},code=sm_${architecture})
    endforeach()
    list(GET CUDA_ARCHITECTURES -1 newest)
    list(APPEND options -gencode arch=compute_${newest},code=compute_${newest})
    set(${result} ${options} PARENT_SCOPE)
endfunction()

# embed_kernels(RESULT kernel.cu...): RESULT is a source file with `mha_deploy_NAME_fatbin` for every NAME.cu,
# and the table `mha_deploy_fatbins` of them all. The assembler reads the bytes: a text of a million numbers
# would compile for minutes.
function(embed_kernels result)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/kernels)
    file(MAKE_DIRECTORY ${folder})
    code_options(options)
    set(bytes "")
    set(rows "")
    set(binaries)
    foreach(kernel ${ARGN})
        get_filename_component(name ${kernel} NAME_WE)
        set(binary ${folder}/${name}.fatbin)
        add_custom_command(OUTPUT ${binary}
            COMMAND ${NVCC} -fatbin -std=c++17 -O3 ${strict_device} ${options}
                -MD -MF ${binary}.d -o ${binary} ${kernel}
            DEPENDS ${kernel} DEPFILE ${binary}.d COMMENT "Compiling device code ${name}.cu" VERBATIM)
        list(APPEND binaries ${binary})
        set(symbol mha_deploy_${name}_fatbin)
        string(APPEND bytes "asm(\".section .rodata\\n.balign 16\\n\"\n"
            "    \".global ${symbol}\\n.hidden ${symbol}\\n\"\n"
            "    \"${symbol}:\\n.incbin \\\"${binary}\\\"\\n.previous\");\n"
            "extern \"C\" unsigned char const ${symbol}[];\n")
        string(APPEND rows "    {\"${name}\", ${symbol}},\n")
    endforeach()
    set(source ${folder}/fatbins.cpp)
    configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/fatbins.cpp.in ${source} @ONLY)
    set_source_files_properties(${source} PROPERTIES OBJECT_DEPENDS "${binaries}")
    set(${result} ${source} PARENT_SCOPE)
endfunction()
