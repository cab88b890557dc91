"""OpenAI's HTTP interface, and every gRPC call as JSON over HTTP, in front of the services of attn-gateway."""
