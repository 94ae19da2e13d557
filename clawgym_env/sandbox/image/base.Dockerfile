# What harnesses and the commands of agents expect of a system: a Debian with Python, git and the usual tools.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      bash ca-certificates curl file git jq less patch procps python3 python3-pip python3-venv ripgrep unzip \
 && rm -rf /var/lib/apt/lists/*
