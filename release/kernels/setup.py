"""The distribution of one library of kernels; release/wheels.py puts it beside this file."""

import os

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """For this platform, and every Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class Binary(Distribution):
    def has_ext_modules(self):
        return True


name = os.environ["NAME"]
package = name.replace("-", "_")
setup(
    name=name,
    version=os.environ["VERSION"],
    description="The kernels of amp_ext, for every version of torch and Python",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=[package],
    package_data={package: ["*.so"]},
    distclass=Binary,
    cmdclass={"bdist_wheel": Wheel},
)
