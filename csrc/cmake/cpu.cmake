# Builds libamp_ext_cpu.so.

# Square roots and conditions are vectorised where they need not set errno or trap.
add_compile_options(-fopenmp-simd -fno-math-errno -fno-trapping-math)
# Fused multiply-adds would make results depend on the instruction set. Only matrix products, whose
# order of summation is open, may have them.
add_compile_options(-ffp-contract=off)
set_source_files_properties(cpu/isa/rows.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=fast)

file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR} cpu/*.cpp)
set(sources_of_isa cpu/isa/span.cpp cpu/isa/rows.cpp cpu/isa/update.cpp)
list(REMOVE_ITEM sources ${sources_of_isa})
add_library(amp_ext_cpu SHARED ${sources})
set_source_files_properties(cpu/library.cpp PROPERTIES COMPILE_DEFINITIONS "${identity}")
link_as_backend(amp_ext_cpu)

# Compiles these files for an instruction set. Which one runs is decided at run time.
function(add_isa isa)
  add_library(${isa} OBJECT ${sources_of_isa})
  target_compile_definitions(${isa} PRIVATE AMP_EXT_ISA=${isa})
  target_compile_options(${isa} PRIVATE ${ARGN})
  target_sources(amp_ext_cpu PRIVATE $<TARGET_OBJECTS:${isa}>)
endfunction()

add_isa(baseline)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  add_isa(avx2 -mavx2 -mfma -mf16c)
  add_isa(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
endif()
