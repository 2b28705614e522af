# Builds libamp_ext_cuda.so.

# CXX is nvcc's compiler too, unless it has arguments, as "ccache g++" has.
if(NOT CMAKE_CXX_COMPILER_ARG1 AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
enable_language(CUDA)
include(cmake/arches.cmake)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
if("$ENV{AMP_EXT_LINEINFO}")
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
endif()

# The report of ptxas lies beside the object file.
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
string(APPEND CMAKE_CUDA_COMPILE_OBJECT
       " > <OBJECT>.log 2>&1 || (cat <OBJECT>.log && false)")

file(GLOB_RECURSE sources kernels/*.cu)
foreach(folder IN ITEMS sm80 sm90)
  file(GLOB own kernels/gemm/${folder}/*.cu)
  list(REMOVE_ITEM sources ${own})
  if(${folder}_arches)
    string(TOUPPER AMP_EXT_${folder} definition)
    add_compile_definitions(${definition})
    add_library(${folder} OBJECT ${own})
    set_target_properties(${folder} PROPERTIES CUDA_ARCHITECTURES "${${folder}_arches}")
    list(APPEND objects $<TARGET_OBJECTS:${folder}>)
  endif()
endforeach()

# The updates' arithmetic is the same, to the bit, on every device.
file(GLOB updates kernels/optim/*.cu)
set_source_files_properties(${updates} PROPERTIES COMPILE_OPTIONS -fmad=false)

add_library(amp_ext_cuda SHARED kernels/library.cpp ${sources} ${objects})
list(JOIN arches " " made_for)
list(APPEND identity AMP_EXT_ARCHITECTURES="${made_for}")
set_source_files_properties(kernels/library.cpp PROPERTIES COMPILE_DEFINITIONS "${identity}")
link_as_backend(amp_ext_cuda)
