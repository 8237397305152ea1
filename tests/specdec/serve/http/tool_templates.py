"""Chat templates that know tools, each in the manner of a family of models."""

HERMES = """{%- if tools %}
{{- "Tools:\\n" }}
{%- for tool in tools %}{{- tool | tojson + "\\n" }}{%- endfor %}
{{- 'Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- message.role + ": " + message.content + "\\n" }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>\\n' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "assistant: " }}{%- endif %}"""

XML = """{%- if tools %}
{%- for tool in tools %}{{- tool.function.name + "(" }}
{%- for key in tool.function.parameters.properties %}{{- key + " " }}{%- endfor %}
{{- ")\\n" }}{%- endfor %}
{{- "Call them as <tool_call><function=name><parameter=key>value</parameter></function>\\n" }}
{%- endif %}
{%- for message in messages %}
    {{- message.role + ": " + message.content + "\\n" }}
    {%- for call in message.tool_calls or [] %}
        {{- "<function=" + call.function.name + ">" }}
        {%- for key, value in call.function.arguments.items() %}
            {{- key + "=" + (value | string) + ";" }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}"""

LLAMA = """{%- for tool in tools or [] %}{{- tool.function | tojson + "\\n" }}{%- endfor %}
{{- 'Answer {"name": a function, "parameters": its arguments}.\\n' }}
{%- for message in messages %}{{- message.role + ": " + message.content + "\\n" }}{%- endfor %}"""

THINKING = (
    HERMES
    + """{%- if enable_thinking is defined and not enable_thinking %}
{{- "<think>\\n\\n</think>\\n\\n" }}{%- else %}{{- "<think>\\n" }}{%- endif %}"""
)
TEMPLATES = {"hermes": HERMES, "qwen3_xml": XML, "llama3_json": LLAMA}
