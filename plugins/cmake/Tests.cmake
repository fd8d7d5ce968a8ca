# add_test_program(NAME LABEL [part...]): tests/NAME.cpp with the work and other parts of the library linked
# in, and a test of it. A program with the label `gpu` ends with 3 where there is no GPU: it is skipped.
function(add_test_program name label)
    add_executable(${name} tests/${name}.cpp $<TARGET_OBJECTS:work>)
    foreach(part ${ARGN})
        target_sources(${name} PRIVATE $<TARGET_OBJECTS:${part}>)
    endforeach()
    target_include_directories(${name} SYSTEM PRIVATE
        ${TENSORRT_INCLUDE} ${CUDNN_FRONTEND_INCLUDE} ${CUDNN_INCLUDE} ${CUDA_INCLUDE})
    target_compile_options(${name} PRIVATE ${strict})
    target_link_libraries(${name} PRIVATE ${libraries})
    add_test(NAME ${name} COMMAND ${name})
    if(label)
        set_tests_properties(${name} PROPERTIES LABELS ${label} SKIP_RETURN_CODE 3)
    endif()
endfunction()
