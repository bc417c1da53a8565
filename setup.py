"""Packaging of tfdist_ext; tool settings live in pyproject.toml."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "tfdist_ext/__init__.py").read_text(), re.MULTILINE)[
    1
]
# The builds of TensorFlow write the same files, so that two of them in one environment break each other: whoever
# installs this package says which one, or has one.
CPU = ["tensorflow>=2.20,<2.22"]
CUDA = ["tensorflow[and-cuda]>=2.20,<2.22"]
# libtpu 0.0.52 ends every process of this TensorFlow: "ConfigureDistributedTpuOp_DoWork not available".
TPU = ["tensorflow-tpu>=2.20,<2.22", "libtpu>=0.0.14,<0.0.22"]
PLACEMENT = ["scipy>=1.11"]
# TensorFlow Datasets imports importlib_resources for MovieLens without asking for it.
EXAMPLES = ["importlib_resources>=6.0", "matplotlib>=3.8"]
NOTEBOOKS = ["ipykernel>=6.29", "nbclient>=0.10", *EXAMPLES, *PLACEMENT]
DOCS = ["myst-parser>=4.0", "sphinx>=8.0"]
# The tools alone, for an environment with a build of TensorFlow of its own.
TEST_TOOLS = [
    "hypothesis>=6.100",
    "mypy>=1.11",
    "pytest>=8.0",
    "pytest-xdist>=3.6",
    "ruff>=0.8",
    *DOCS,
    *NOTEBOOKS,
]
TEST = [*TEST_TOOLS, *CPU]

setuptools.setup(
    name="tfdist_ext",
    version=VERSION,
    description="tf.distribute for Keras 3: multi-worker training that equals the single-device run",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=setuptools.find_namespace_packages(include=["tfdist_ext", "tfdist_ext.*"]),
    package_data={
        "tfdist_ext": ["py.typed"],
        "tfdist_ext.data": ["*.npz", "*.csv", "*.csv.gz", "*.txt"],
    },
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.0",
        "keras>=3.15,<3.17",
        "numpy>=1.26",
        "pyzmq>=25.0",
        "tensorflow-datasets>=4.9.6",
    ],
    extras_require={
        "cpu": CPU,
        "cuda": CUDA,
        "tpu": TPU,
        "placement": PLACEMENT,
        "examples": EXAMPLES,
        "notebooks": NOTEBOOKS,
        "docs": [*DOCS, *CPU],
        "test": TEST,
        "test_tools": TEST_TOOLS,
        "dev": [*TEST, "build>=1.0", "pre-commit>=3.0"],
    },
    entry_points={"console_scripts": ["tfdist-ext = tfdist_ext.launch.command:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
