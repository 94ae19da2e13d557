# A harness on any base, at the path where a sandbox without such an image is shown it.
ARG BASE
FROM ${BASE}
COPY opt /opt
