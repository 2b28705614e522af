# Chooses the architectures of the kernels from TORCH_CUDA_ARCH_LIST, which has torch's syntax:
# "8.0+PTX;9.0a" or "8.0 8.6".
string(REGEX MATCHALL "[^ ;]+" arches "$ENV{TORCH_CUDA_ARCH_LIST}")
foreach(arch IN LISTS arches)
  if(NOT arch MATCHES "^[0-9]+[.][0-9][af]?([+]PTX)?$")
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST takes 8.0+PTX or 9.0a, but not '${arch}'")
  endif()
endforeach()
# The Hopper kernels need 9.0a, and the same GPUs run it. 9.0+PTX remains for later GPUs.
list(TRANSFORM arches REPLACE "^9.0$" "9.0a")
list(TRANSFORM arches REPLACE "^9.0[+]PTX$" "9.0a;9.0+PTX")

# By default, those below that nvcc knows.
if(NOT arches)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known)
  foreach(arch IN ITEMS 7.5 8.0+PTX 9.0a 10.0 12.0)
    string(REGEX REPLACE "[^0-9]" "" number ${arch})
    if(known MATCHES "compute_${number}\n")
      list(APPEND arches ${arch})
    endif()
  endforeach()
endif()

# In CMake's words 75-real is machine code alone, and 80 has PTX too.
string(REPLACE "." "" CMAKE_CUDA_ARCHITECTURES "${arches}")
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^([0-9]+[af]?)$" "\\1-real")
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "[+]PTX" "")

# Later GPUs run the sm80 kernels where those of their own architecture refuse a product. PTX is
# enough for 10.x and 11.x, whose tensor cores have other instructions (tcgen05).
set(sm80_arches ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER sm80_arches EXCLUDE REGEX "^[567]")
if(";${CMAKE_CUDA_ARCHITECTURES};" MATCHES ";(8.|90);")
  list(FILTER sm80_arches EXCLUDE REGEX "^1[01]")
endif()

set(sm90_arches ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER sm90_arches INCLUDE REGEX "^90a")
