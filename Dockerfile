# The course in a container, for CPUs: docker build -t course_pp . && docker run --rm -p 8888:8888 course_pp
# For GPUs, and where INDEX cannot be reached, --build-arg INDEX= takes PyTorch's ordinary wheels, which bring CUDA.
FROM python:3.11-slim-bookworm
ARG INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/course_pp/.venv/bin:$PATH
# The version of make is the image's.
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install -y -q --no-install-recommends make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 learner && mkdir /opt/course_pp && chown learner /opt/course_pp
USER 1000
WORKDIR /opt/course_pp
# The packages first: a change of the course does not install them again.
COPY --chown=learner pyproject.toml constraints.txt README.md LICENSE LICENSE-CC-BY-4.0 ./
COPY --chown=learner course_pp/__init__.py course_pp/
RUN python -m venv .venv \
    && pip install --quiet ${INDEX:+--extra-index-url $INDEX} --constraint constraints.txt --editable '.[course,hf]'
COPY --chown=learner . .
# Ranks share memory through files in /dev/shm, of which Docker gives 64 MB: run with --shm-size=1g for large models.
EXPOSE 8888
CMD ["python", "-m", "course_pp", "lab", "--", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
