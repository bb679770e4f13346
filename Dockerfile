# Build:  docker build -t drama .
# Train:  docker run --gpus all --ipc=host -v "$PWD/runs:/app/runs" -v drama-cache:/app/cache drama python train.py --config config_files/atari100k.yaml
# The volume drama-cache keeps compiled programs: without it every container compiles anew, for minutes.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# g++ and python3-dev also at run time: Triton and torch.compile build small launchers.
# libegl1, libgl1 and libgles2 hand rendering without a screen to the GPU driver.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ libegl1 libgl1 libgles2 libopengl0 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 drama \
    && install -d -o drama -g drama /app /opt/venv

USER drama
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    MUJOCO_GL=egl \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    TRITON_CACHE_DIR=/app/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/app/cache/inductor

COPY --chown=drama:drama requirements.txt requirements-envs.txt ./
RUN python3 -m venv /opt/venv && pip install -r requirements.txt -r requirements-envs.txt

COPY --chown=drama:drama . .

# There is no GPU while an image is built, so the kernels are built for the architectures named here.
ARG TORCH_CUDA_ARCH_LIST="8.0;8.6;8.9;9.0a"
ARG MAX_JOBS=4
RUN MAMBA_FORCE_CUDA=1 pip install -e . --no-build-isolation \
    && mkdir -p runs cache && chmod 1777 runs cache

VOLUME /app/runs /app/cache
CMD ["python", "train.py", "--help"]
