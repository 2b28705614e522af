# Builds amp_ext._C for the Python of Python_EXECUTABLE and the torch in the folder AMP_EXT_TORCH.
# A CUDA build names nvcc in CUDAToolkit_NVCC_EXECUTABLE. TorchConfig.cmake would add flags.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

file(GLOB_RECURSE sources bindings/*.cpp)
set(includes ${AMP_EXT_TORCH}/include)
set(libraries c10 torch torch_cpu torch_python)
if(CUDAToolkit_NVCC_EXECUTABLE)
  list(FILTER sources EXCLUDE REGEX "/backends/none[.]cpp$")
  list(APPEND libraries c10_cuda torch_cuda CUDA::cudart)
  # Headers that the toolkit lacks are in wheels beside torch: those of CUDA 13 in one folder, those
  # of CUDA 12 in a folder for each wheel.
  find_package(CUDAToolkit REQUIRED)
  file(GLOB wheels ${AMP_EXT_TORCH}/../nvidia/*/include)
  list(FILTER wheels EXCLUDE REGEX "/cu[0-9]+/include$")
  set(own ${AMP_EXT_TORCH}/../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/include)
  list(APPEND includes ${CUDAToolkit_INCLUDE_DIRS} ${own} ${wheels})
else()
  list(FILTER sources EXCLUDE REGEX "/backends/cuda[.]cpp$")
endif()

# Reading torch's headers takes longest: two units compile in parallel.
list(LENGTH sources count)
math(EXPR half "(${count} + 1) / 2")
python_add_library(_C MODULE WITH_SOABI ${sources})
set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${half})
# at::parallel_for is serial without -fopenmp; torch has loaded the OpenMP runtime. GCC 12 takes
# reads in torch's headers for writes past an end.
target_compile_options(_C PRIVATE -fopenmp -Wno-stringop-overflow)
target_compile_definitions(_C PRIVATE ${identity})
target_include_directories(_C SYSTEM PRIVATE ${includes})
target_link_directories(_C PRIVATE ${AMP_EXT_TORCH}/lib)
target_link_libraries(_C PRIVATE ${libraries})
