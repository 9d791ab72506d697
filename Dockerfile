ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.18
FROM ${SGLANG_IMAGE}

WORKDIR /opt/swaleak
COPY pyproject.toml README.md LICENSE ./
COPY swaleak ./swaleak
COPY scenarios ./scenarios
# Every requirement is met by the image already, so pip replaces nothing.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir .

WORKDIR /workspace
ENTRYPOINT ["swaleak"]
CMD ["verify"]
