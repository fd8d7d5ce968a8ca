# add_test_program(NAME [part...]): tests/NAME.cpp with the work and other parts of the library linked in.
function(add_test_program name)
    add_executable(${name} tests/${name}.cpp $<TARGET_OBJECTS:work>)
    foreach(part ${ARGN})
        target_sources(${name} PRIVATE $<TARGET_OBJECTS:${part}>)
    endforeach()
    target_include_directories(${name} SYSTEM PRIVATE
        ${TENSORRT_INCLUDE} ${CUDNN_FRONTEND_INCLUDE} ${CUDNN_INCLUDE} ${CUDA_INCLUDE})
    target_compile_options(${name} PRIVATE ${strict})
    target_link_libraries(${name} PRIVATE ${libraries})
endfunction()
