# Test programs, with GoogleTest linked in so that they run on machines without it.

# GoogleTest's sources, as Debian's package `googletest` has them, or an installed one; where neither is there and
# MHA_DEPLOY_FETCH_GOOGLETEST allows it, from the network.
function(find_googletest result)
    set(source ${GOOGLETEST_SOURCE})
    if(NOT source AND EXISTS /usr/src/googletest/CMakeLists.txt)
        set(source /usr/src/googletest)
    endif()
    set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
    set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
    if(source)
        add_subdirectory(${source} googletest EXCLUDE_FROM_ALL SYSTEM)
    else()
        find_package(GTest QUIET)
    endif()
    if(NOT TARGET gtest AND NOT TARGET GTest::gtest AND MHA_DEPLOY_FETCH_GOOGLETEST)
        include(FetchContent)
        FetchContent_Declare(googletest URL https://github.com/google/googletest/archive/refs/tags/v1.15.2.tar.gz)
        FetchContent_MakeAvailable(googletest)
    endif()
    foreach(target gtest GTest::gtest)
        if(TARGET ${target})
            set(${result} ${target} PARENT_SCOPE)
            return()
        endif()
    endforeach()
    message(FATAL_ERROR "BUILD_TESTING needs GoogleTest, which is not there. Install it (apt install googletest), "
        "give its sources, -DGOOGLETEST_SOURCE=/path/to/googletest, or allow to fetch them, "
        "-DMHA_DEPLOY_FETCH_GOOGLETEST=ON.")
endfunction()

# add_test_program(NAME LABEL [part...]): tests/NAME.cpp with the work and other parts of the library linked
# in, and a test of it. A program with the label `gpu` ends with 3 where there is no GPU: it is skipped.
function(add_test_program name label)
    add_executable(${name} tests/${name}.cpp tests/counted.cpp $<TARGET_OBJECTS:work>)
    foreach(part ${ARGN})
        target_sources(${name} PRIVATE $<TARGET_OBJECTS:${part}>)
    endforeach()
    target_include_directories(${name} SYSTEM PRIVATE
        ${TENSORRT_INCLUDE} ${CUDNN_FRONTEND_INCLUDE} ${CUDNN_INCLUDE} ${CUDA_INCLUDE})
    target_compile_options(${name} PRIVATE ${strict})
    target_link_libraries(${name} PRIVATE ${googletest} ${libraries})
    if(NOT MHA_DEPLOY_SANITIZE)
        # counted.cpp counts what it takes, and only for this program
        target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,libstdc++.a)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    if(label)
        set_tests_properties(${name} PROPERTIES LABELS ${label} SKIP_RETURN_CODE 3)
    endif()
endfunction()

# The library that stands for a GPU, under every name that is looked for, and found before any other of them.
function(add_fake_gpu program)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/fake_gpu)
    add_library(fake_gpu SHARED tests/fake_gpu.cpp)
    target_include_directories(fake_gpu SYSTEM PRIVATE ${CUDNN_INCLUDE} ${CUDA_INCLUDE})
    target_compile_options(fake_gpu PRIVATE ${strict})
    set_target_properties(fake_gpu PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${folder})
    foreach(name cuda.so.1 cudnn.so.9 cublasLt.so.13 cudart.so.12)
        add_custom_command(TARGET fake_gpu POST_BUILD
            COMMAND ${CMAKE_COMMAND} -E create_symlink libfake_gpu.so ${folder}/lib${name})
    endforeach()
    target_link_libraries(${program} PRIVATE fake_gpu)
    # As DT_RPATH, which comes before LD_LIBRARY_PATH.
    set_target_properties(${program} PROPERTIES BUILD_RPATH "\$ORIGIN/fake_gpu")
    target_link_options(${program} PRIVATE -Wl,--disable-new-dtags)
endfunction()
